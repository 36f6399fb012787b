"""A model's description for the scheduler: tokenizer, chat template, special tokens, sizes (plan.proto's Model)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roster_protos import plan_pb2
from runner_svc.model.config import ModelConfig, token_ids
from runner_svc.model.errors import ModelNotFound
from runner_svc.model.folder.json_file import read_object

# Vocabularies in formats older than tokenizer.json, which transformers converts.
_OLDER_VOCABULARIES = ("tokenizer.model", "vocab.json")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def describe_model(name: str, folder: Path, config: ModelConfig, weights_version: str) -> plan_pb2.Model:
    """Returns the model's description; `name` is the runner's setting `model`.

    Raises ModelNotFound if the folder has no tokenizer.
    """
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    return plan_pb2.Model(
        name=name,
        architecture=config.architecture,
        weights_version=weights_version,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        eos_token_ids=_eos_token_ids(folder, config),
        tokenizer=_tokenizer_json(folder),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(folder, tokenizer_config),
        prefix_positions=config.prefix_positions,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the file's JSON object, or {} if the file does not exist. Raises UnsupportedModel for a broken file."""
    return read_object(path)


def _eos_token_ids(folder: Path, config: ModelConfig) -> list[int]:
    """Returns the ids of generation_config.json, as chat models have several end tokens, then those of the config."""
    generation = token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))
    return list(dict.fromkeys((*generation, *config.eos_token_ids)))


def _tokenizer_json(folder: Path) -> bytes:
    """Returns tokenizer.json without truncation and padding, which training scripts leave in it."""
    path = folder / "tokenizer.json"
    if path.is_file():
        content = path.read_bytes()
    else:
        content = _converted_tokenizer(folder)
    parsed = json.loads(content)
    if parsed.get("truncation") is None and parsed.get("padding") is None:
        return content
    return json.dumps({**parsed, "truncation": None, "padding": None}, ensure_ascii=False).encode()


def _converted_tokenizer(folder: Path) -> bytes:
    """Returns a tokenizer in an older format, converted by transformers."""
    # Checked first, because transformers makes an empty tokenizer from an empty folder.
    if not any((folder / name).is_file() for name in _OLDER_VOCABULARIES):
        raise ModelNotFound(f"{folder} has no tokenizer: no tokenizer.json, {' or '.join(_OLDER_VOCABULARIES)}.")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except (OSError, ValueError, AttributeError) as error:
        raise ModelNotFound(f"The tokenizer in {folder} can't be converted to tokenizer.json: {error}") from error


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    """Returns chat_template.jinja or the template in tokenizer_config.json; of several templates, "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", "")
    return str(template)


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    merged = {**read_json(folder / "special_tokens_map.json"), **tokenizer_config}
    tokens = {}
    for key in _SPECIAL_TOKENS:
        value = merged.get(key)
        if isinstance(value, dict):  # a serialized AddedToken
            value = value.get("content")
        if value:
            tokens[key] = str(value)
    return tokens
