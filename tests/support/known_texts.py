"""Streams of a real model in process, with and without drafts, and a drafter that knows the texts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.execution.runner import Runner
from runner_svc.sampling.gumbel import gumbel, key_words
from runner_svc.sampling.noise import draw_key
from tests.support.plans import SAMPLE, admission, ints, plan, sampling


@dataclass
class Stream:
    """A sequence, its parameters, and what it got: tokens, and log-probabilities of all ids at each."""

    prompt: list[int]
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    status: int = 0

    def scores(self, place: int) -> NDArray[np.float64]:
        """Returns what the draw at `place` is the argmax of, [vocab_size]."""
        temperature = self.sampling.get("temperature", 0.0)
        values = self.logprobs[place].astype(np.float64)
        if not temperature:
            return values
        key = np.array([draw_key(self.seed, 0, len(self.prompt) + place)], np.uint64)
        noise = gumbel(key_words(key, torch.device("cpu")), torch.arange(len(values), dtype=torch.int32))
        return values / temperature + noise[0].double().numpy()


class KnownTexts:
    """Proposes the tokens of `texts`, by slot, each wrong with probability `wrong`; a random number of them."""

    name = "known"

    def __init__(self, dice: random.Random, vocab_size: int, wrong: float) -> None:
        self.texts: dict[int, list[int]] = {}
        self._dice, self._vocab_size, self._wrong = dice, vocab_size, wrong

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = np.full((len(slots), int(most.max())), -1, np.int32)
        for row, (slot, counter, count) in enumerate(
            zip(slots.tolist(), counters.tolist(), most.tolist(), strict=True)
        ):
            text = self.texts[slot][counter : counter + self._dice.randint(min(1, count), count)]
            text = [self._dice.randrange(self._vocab_size) if self._dice.random() < self._wrong else t for t in text]
            proposals[row, : len(text)] = text
        return proposals


class Most(random.Random):
    """Chooses the largest of any range: as many drafts as there may be."""

    def randint(self, a: int, b: int) -> int:
        return b


@dataclass
class Counts:
    """Drafts of all rows."""

    drafted: int = 0
    accepted: int = 0


def copies(those: list[Stream]) -> list[Stream]:
    """Returns the same sequences as they were before they got anything."""
    return [Stream(stream.prompt, stream.seed, stream.sampling) for stream in those]


def stream_all(backend: TorchBackend, streams: list[Stream], max_tokens: int, dice: random.Random | None) -> Counts:
    """Appends `max_tokens` tokens to each stream, in its own slot; with `dice`, rows draft random numbers of tokens.

    A prompt enters in two chunks beside rows of other sequences. A stream ends early if its status is not 0.
    """
    runner, counts = Runner(backend), Counts()
    size = backend.block_size
    per_slot = -(-max(len(stream.prompt) + max_tokens + 1 for stream in streams) // size)
    number, done = 0, dict.fromkeys(range(len(streams)), 0)  # computed positions
    while done:
        number += 1
        admissions, extents, drafts = [], [], []
        for slot, start in done.items():
            stream = streams[slot]
            if number == 1:
                own = range(1 + slot * per_slot, 1 + (slot + 1) * per_slot)
                asked = sampling(logprobs=backend.model.vocab_size, **stream.sampling)
                admissions.append(admission(slot, stream.prompt, own, seed=stream.seed, sampling=asked))
            left = max_tokens - len(stream.tokens)
            prefill = len(stream.prompt) - start
            if prefill > 0 and not stream.tokens:
                count = prefill if number > 1 + slot % 2 else min(prefill, 3)
                extents.append((slot, start, count, SAMPLE if count == prefill else 0))
                drafts.append(0)
                continue
            most = 0 if dice is None else dice.randint(0, min(backend.max_drafts, left - 1))
            extents.append(
                (slot, start if dice is None or (not most and dice.randrange(4) == 0) else -1, 1 + most, SAMPLE)
            )
            drafts.append(most)
        result = runner.execute(
            number, plan(admissions=admissions, extents=extents, drafts=drafts if any(drafts) else ())
        )
        _take(result, extents, streams, counts)
        for slot, _, count, flags in extents:
            stream = streams[slot]
            done[slot] = len(stream.prompt) + len(stream.tokens) - 1 if flags else done[slot] + count
            if len(stream.tokens) >= max_tokens or stream.status:
                del done[slot]
    return counts


def _take(result: Any, extents: list[tuple[int, int, int, int]], streams: list[Stream], counts: Counts) -> None:
    tokens = ints(result.tokens)
    entries = {entry.row: entry for entry in result.logprobs}
    for row, (slot, *_) in enumerate(extents):
        stream, count = streams[slot], result.token_counts[row]
        stream.tokens += tokens[:count]
        tokens = tokens[count:]
        stream.status = result.statuses[row]
        assert (row in entries) == (count > 0)
        if count:
            entry = entries[row]
            top_ids = np.frombuffer(entry.top_ids, np.int32).reshape(count, entry.top)
            top_values = np.frombuffer(entry.top_values, np.float32).reshape(count, entry.top)
            values = np.frombuffer(entry.values, np.float32)
            assert len(values) == count
            for place, token in enumerate(stream.tokens[-count:]):
                line = np.empty(entry.top, np.float32)
                line[top_ids[place]] = top_values[place]
                assert line[token] == values[place]
                stream.logprobs.append(line)
        if result.drafted and result.drafted[row]:
            counts.drafted += result.drafted[row]
            counts.accepted += max(0, count - 1)
    assert not tokens
