"""A model's description for the scheduler: tokenizer, chat template, special tokens, sizes (plan.proto's Model)."""

from __future__ import annotations

from pathlib import Path

import structlog
from tokenizers import Tokenizer

from roster_protos import plan_pb2
from runner_svc.interface.progress import Progress
from runner_svc.interface.served_config import ServedConfig
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.folder.json_file import read_object
from runner_svc.model.tokenizer.ends import stated_ends
from runner_svc.model.tokenizer.errors import MissingTokenizer, UnusableTokenizer
from runner_svc.model.tokenizer.generation_keys import check_generation_keys
from runner_svc.model.tokenizer.kept import read_tokenizer
from runner_svc.model.tokenizer.likeness import check_special_tokens
from runner_svc.model.tokenizer.parts import TokenizerParts, with_special

log = structlog.get_logger()


def describe_model(
    name: str,
    folder: Path,
    config: ServedConfig,
    weights_version: str,
    cache_folder: Path | None = None,
    progress: Progress = lambda what, share: None,
) -> plan_pb2.Model:
    """Returns what the scheduler needs to know of the model.

    `name`: the runner's setting `model`. `cache_folder`: keeps the tokenizer there for the next start. Raises
    ModelNotFound if the folder has no tokenizer, UnsupportedModel if its tokenizer or ends of answers can't be served.
    """
    progress("reading the tokenizer", 0.0)
    try:
        ends, notes = _stated_ends(folder, config)
        parts = read_tokenizer(folder, cache_folder)
        ends += [token for token in _own_end(parts, config, notes) if token not in ends]
        tokenizer = parts.tokenizer
        if others := set(ends).difference(parts.special_ids):
            check_special_tokens(Tokenizer.from_str(tokenizer), others)
            tokenizer = with_special(tokenizer, others)
    except MissingTokenizer as error:
        raise ModelNotFound(str(error)) from error
    except UnusableTokenizer as error:
        raise UnsupportedModel(str(error)) from error
    for note in (*parts.notes, *notes):
        log.info("tokenizer", note=note)
    progress("reading the tokenizer", 1.0)
    return plan_pb2.Model(
        name=name,
        architecture=config.architecture,
        weights_version=weights_version,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        eos_token_ids=ends,
        tokenizer=tokenizer.encode(),
        chat_template=parts.chat_template,
        special_tokens=parts.special_tokens,
        prefix_positions=config.prefix_positions,
        decoder=config.decoder,
    )


def _stated_ends(folder: Path, config: ServedConfig) -> tuple[list[int], list[str]]:
    """Returns the ids that end an answer by the configurations, and sentences for the log."""
    generation_config, raw = read_object(folder / "generation_config.json"), read_object(folder / "config.json")
    notes = check_generation_keys(generation_config)
    generation = stated_ends("generation_config.json", generation_config, config.vocab_size)
    stated = raw if "eos_token_id" in raw else raw.get("text_config") or {}
    of_config = stated_ends("config.json", stated, config.vocab_size)
    if "eos_token_id" not in stated and not generation:  # then transformers takes the default of the class
        of_config = tuple(token for token in config.eos_token_ids if token < config.vocab_size)
    return list(dict.fromkeys((*generation, *of_config))), notes


def _own_end(parts: TokenizerParts, config: ServedConfig, notes: list[str]) -> list[int]:
    """Returns the tokenizer's own end, if the model can return it. Adds a sentence to `notes` otherwise."""
    own = parts.eos_token_id
    if own is None:
        return []
    if own < config.vocab_size:
        return [own]
    notes.append(
        f"The tokenizer's `eos_token` has the id {own}, but the model's ids are 0 to {config.vocab_size - 1}: the "
        "model can't return it."
    )
    return []
