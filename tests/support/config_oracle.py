"""Loads a model folder with Roster's decoder and with transformers, both in float32 on the CPU, and compares them."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from runner_svc.attention.cpu import CpuAttention
from runner_svc.decoder.cpu_decoder import Decoder, DecoderInputs
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import ModelNotFound, UnsupportedModel
from runner_svc.model.folder.config_file import read_config

PROMPT = [37, *range(40, 70), 8, 9, 200]
NEW_TOKENS = 8
BLOCK_SIZE = 16
# Sums in another order; a wrong key moves logits by their standard deviation, about 10.
ERROR = 2e-3


@dataclass(frozen=True)
class Served:
    """What a decoder answers: greedy tokens after the prompt, logits [places, vocab_size], ends of an answer."""

    tokens: list[int]
    logits: Tensor
    ends: frozenset[int]


@dataclass(frozen=True)
class Verdict:
    """How the decoders compare. A sentence is a refusal; `theirs` is None where transformers serves the folder."""

    ours: str | None
    theirs: str | None
    difference: str | None = None


def compare(folder: Path) -> Verdict:
    """Returns how the decoders compare. Anything that Roster raises but a sentence goes through."""
    try:
        ours = _ours(folder)
    except (UnsupportedModel, ModelNotFound) as error:
        return Verdict(str(error), _their_complaint(folder))
    with _quiet():
        try:
            theirs = _theirs(folder, ours.tokens)
        except Exception as error:
            return Verdict(None, f"{type(error).__name__}: {error}")
    return Verdict(None, None, _difference(ours, theirs))


def refusal(folder: Path) -> str | None:
    """Returns the sentence with which Roster's decoder refuses the folder."""
    try:
        _ours(folder)
    except (UnsupportedModel, ModelNotFound) as error:
        return str(error)
    return None


def variant(base: Path, folder: Path, changes: Mapping[str, Any], removed: str | None = None) -> Path:
    """Makes a folder with the weights of another one and a changed configuration, without generation_config.json."""
    folder.mkdir(parents=True)
    raw = json.loads((base / "config.json").read_text())
    raw.pop(removed, None)
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    for path in base.glob("*.safetensors"):
        (folder / path.name).hardlink_to(path)
    return folder


@torch.inference_mode()
def _ours(folder: Path) -> Served:
    config = ModelConfig.from_hugging_face(read_config(folder))
    cpu = torch.device("cpu")
    decoder = Decoder(config, load_weights(folder, config, torch.float32, cpu, lambda what, share: None))
    num_blocks = -(-(len(PROMPT) + NEW_TOKENS) // BLOCK_SIZE)
    cache = KVCache(config, num_blocks, BLOCK_SIZE, torch.float32, cpu)
    attention = CpuAttention(cache, config.num_heads, config.num_kv_heads, decoder.config.attention_layers)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    tokens, rows, start = list(PROMPT), [], 0
    while len(tokens) < len(PROMPT) + NEW_TOKENS:
        count = len(tokens) - start
        plan = attention.plan(np.array([start], np.int32), np.array([count], np.int32), table)
        positions = torch.arange(start, len(tokens))
        inputs = DecoderInputs(
            tokens=torch.tensor(tokens[start:]),
            positions=positions,
            slot_mapping=positions,
            prompt_lens=torch.full_like(positions, len(PROMPT)),
        )
        hidden = decoder.forward(inputs, cache, partial(attention.run, plan))
        rows.append(decoder.logits(hidden))
        start = len(tokens)
        tokens.append(int(rows[-1][-1].argmax()))
    return Served(tokens[len(PROMPT) :], torch.cat(rows), frozenset(config.eos_token_ids))


def _theirs(folder: Path, tokens: list[int]) -> Served:
    """Given Roster's tokens, so that one forward pass says whether each is the likeliest.

    Without a cache: for a class without windows whose configuration has one, transformers' cache drops keys that its
    own forward pass attends to.
    """
    model = _loaded(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens[:-1]]), use_cache=False).logits[0]
    return Served(logits[len(PROMPT) - 1 :].argmax(-1).tolist(), logits, _their_ends(model))


def _loaded(folder: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"made up {missing[0]}")
    return model


def _their_complaint(folder: Path) -> str | None:
    with _quiet():
        try:
            model = _loaded(folder)
            prompt = torch.tensor([PROMPT])
            model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=2)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def _their_ends(model: Any) -> frozenset[int]:
    """The ends of `generate`, but for those that are not in the vocabulary."""
    ends = model.generation_config.eos_token_id
    listed = [] if ends is None else [ends] if isinstance(ends, int) else ends
    return frozenset(token for token in listed if 0 <= token < model.config.vocab_size)


def _difference(ours: Served, theirs: Served) -> str | None:
    if ours.logits.shape != theirs.logits.shape:
        return f"logits are {tuple(ours.logits.shape)}, not {tuple(theirs.logits.shape)}"
    error = float((ours.logits - theirs.logits).abs().max())
    if not error < ERROR:
        return f"logits differ by {error:.4f}"
    if ours.tokens != theirs.tokens:
        return f"tokens are {ours.tokens}, not {theirs.tokens}"
    if ours.ends != theirs.ends:
        return f"ends are {sorted(ours.ends)}, not {sorted(theirs.ends)}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bars and warnings, which would hide the test's own output."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(level)


def numbered(folder: Path) -> Iterator[Path]:
    """Yields names of new folders in a folder."""
    return (folder / str(number) for number in itertools.count())
