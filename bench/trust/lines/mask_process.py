"""Extra cost of masks from a separate process over masks made in-process, for plans of 1 and of 64 rows.

Both ways get the same tokens and alternate every few plans, so that a busy machine slows both.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor

from bench.trust.line import Line
from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import NUM_TOKENS, byte_model
from runner_svc.catalog.source import model_folder
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model
from runner_svc.model.folder.config_file import read_config
from runner_svc.settings.runner_settings import default_cache_folder
from scheduler_svc.constrained.mask_client import AwaitedRow, MaskClient
from scheduler_svc.constrained.process.compiler import GrammarCompiler, grammar_text
from scheduler_svc.constrained.process.masks import OutputMatcher

MOST_ADDED_US = 100.0
THREADS = 2
ROWS = (1, 64)
BLOCK = 10
"""Consecutive plans of one way, because each way has its own vocabulary in the caches."""
ALL = 0xFFFFFFFF
LARGE = 131_072
CONSTRAINT = ("regex", r"[a-zA-Z ,.]*")
"""Constraint under which any word may follow any other, so an allowed first token is always allowed."""


@dataclass(slots=True, frozen=True)
class HereRow:
    """Row that waits for its mask, in the form that the scheduler used."""

    row: int
    output: OutputMatcher
    tokens: list[int]


@dataclass(slots=True)
class Trial:
    """Times of plans in µs, in-process and through the mask process."""

    here_us: list[float]
    there_us: list[float]

    @property
    def added_us(self) -> float:
        """Difference of the medians."""
        return float(np.median(self.there_us) - np.median(self.here_us))


def run(quick: bool) -> Line:
    """Tries vocabularies of 49k ids and, unless `quick`, of 131k."""
    models = [smollm2()] if quick else [smollm2(), widened(smollm2(), LARGE)]
    parts, worst = [], 0.0
    for model in models:
        client = MaskClient.of(model, THREADS)
        try:
            for rows in ROWS:
                trial = measured(model, client, rows, plans=200 if quick else 400)
                worst = max(worst, trial.added_us)
                parts.append(
                    f"{trial.added_us:+.0f} µs to {np.median(trial.here_us):.0f} at {rows} rows of {model.vocab_size}"
                )
        finally:
            client.close()
    return Line(
        promise="masks of one plan from a separate process cost hardly more than in-process",
        figure=f"p50 {', '.join(parts)} ids",
        bar=f"at most {MOST_ADDED_US:.0f} µs more at p50",
        met=worst <= MOST_ADDED_US,
    )


def measured(model: plan_pb2.Model, client: MaskClient, rows: int, plans: int) -> Trial:
    """Times `plans` plans of `rows` rows."""
    executor, width = LLExecutor(THREADS), -(-model.vocab_size // 32)
    compiler, stops = GrammarCompiler(model), list(model.eos_token_ids)
    here = [
        OutputMatcher(compiler.compile(grammar_text(*CONSTRAINT)), 0, np.array(stops, np.int32)) for _ in range(rows)
    ]
    grammar, _ = client.check(*CONSTRAINT, [])
    there = client.open(grammar, rows, 0, stops)
    words, rng, trial = _words(model, client), random.Random(rows), Trial([], [])
    for _ in range(0, plans, BLOCK):
        told = [[[rng.choice(words)] for _ in range(rows)] for _ in range(BLOCK)]
        masks = []
        for tokens in told:
            began = time.perf_counter()
            masks.append(_here(executor, [HereRow(row, each, tokens[row]) for row, each in enumerate(here)], width))
            trial.here_us.append((time.perf_counter() - began) * 1e6)
        for tokens, expected in zip(told, masks, strict=True):
            began = time.perf_counter()
            made = client.make([AwaitedRow(row, each, tokens[row]) for row, each in enumerate(there)])
            trial.there_us.append((time.perf_counter() - began) * 1e6)
            if made.failures or made.masks != expected:
                raise RuntimeError(f"the masks of the two ways differ: {made.failures}")
    return trial


def _here(executor: LLExecutor, rows: list[HereRow], words: int) -> plan_pb2.Masks:
    """Makes the masks in this thread, as the scheduler did at 44e92c9: validates each token before consuming it."""
    bits, failures, ready = np.full((len(rows), words), ALL, "<u4"), [], []
    masks = plan_pb2.Masks()
    for index, row in enumerate(rows):
        problem = row.output.feed(row.tokens)
        if problem:
            failures.append((index, problem))
        else:
            ready.append((row.output.matcher, index))
    executor.unsafe_compute_mask_ptr(ready, bits.ctypes.data, 4 * words, len(rows))
    for matcher, index in ready:
        if matcher.is_error():
            failures.append((index, matcher.get_error()))
        else:
            rows[index].output.put_off_stops(bits[index])
    for row, line in zip(rows, bits, strict=True):
        masks.rows.add(row=row.row, bits=line.tobytes())
    if failures:
        raise RuntimeError(f"masks failed: {failures}")
    return masks


def _words(model: plan_pb2.Model, client: MaskClient) -> list[int]:
    """Returns the tokens that are allowed first and are not stop tokens."""
    grammar, _ = client.check(*CONSTRAINT, [])
    (output,) = client.open(grammar, 1, 0, [])
    (mask,) = client.make([AwaitedRow(0, output, [])]).masks.rows
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little")).tolist()
    return [token for token in allowed if token not in model.eos_token_ids]


def smollm2() -> plan_pb2.Model:
    """Returns SmolLM2's description by its runner, or a vocabulary of bytes if the model is not installed."""
    try:
        folder = model_folder("smollm2", default_cache_folder(), lambda what, share: None)
    except (OSError, ValueError, ImportError):
        return byte_model("hash", "HashModel", NUM_TOKENS, 2048)
    config = ModelConfig.from_hugging_face(read_config(folder))
    return describe_model("smollm2", folder, config, "")


def widened(model: plan_pb2.Model, size: int) -> plan_pb2.Model:
    """Returns the model with made-up words added up to `size` ids."""
    described = json.loads(model.tokenizer.decode())
    vocabulary, rng = described["model"]["vocab"], random.Random(1)
    while len(vocabulary) < size:
        word = "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", k=rng.randint(5, 12)))
        vocabulary.setdefault(rng.choice(("Ġ", "")) + word, len(vocabulary))
    wide = plan_pb2.Model()
    wide.CopyFrom(model)
    wide.vocab_size, wide.tokenizer = size, json.dumps(described).encode()
    return wide
