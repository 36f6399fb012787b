"""One sequence of a deterministic backend on the CPU, computed in many ways: every position's logits as integers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner_svc.backends.torch_backend import TorchBackend
from tests.support.host_backend import no_progress
from tests.support.logits_of_steps import Part, Steps, different

BLOCKS = 120


def load(folder: Path, *, deterministic: bool = True, **sizes: Any) -> TorchBackend:
    sizes = {"num_blocks": BLOCKS, "block_size": 16, "num_slots": 8, "max_step_tokens": 512, **sizes}
    loaded = TorchBackend.load(
        str(folder), cache_folder=folder / "unused", progress=no_progress, deterministic=deterministic, **sizes
    )
    loaded.cache.data.fill_(torch.nan)  # so that reading an unwritten position shows
    return loaded


class Walk:
    """One sequence of random tokens, computed in several ways; `wanted` are its logits in one chunk.

    Each method returns the number of positions whose logits then differ in a bit.
    """

    def __init__(self, backend: TorchBackend, rng: random.Random, length: int = 300, num_blocks: int = BLOCKS) -> None:
        """`length`: positions of each of up to five sequences, as many as `num_blocks` hold."""
        self.backend, self._rng, self._steps = backend, rng, Steps(backend)
        self._length = min(length, backend.model.context_length - 10)
        blocks = list(range(1, num_blocks + 1))
        rng.shuffle(blocks)
        needed = -(-(self._length + 10) // 16)
        self._tables = [blocks[number * needed : (number + 1) * needed] for number in range(len(blocks) // needed)][:5]
        self._tokens = [self._random_tokens(self._length) for _ in self._tables]
        self.wanted = self._logits([self._part(0, 0, self._length)])[0]

    def _random_tokens(self, number: int) -> list[int]:
        return [self._rng.randrange(self.backend.model.vocab_size) for _ in range(number)]

    def _part(self, sequence: int, start: int, end: int, drafts: Sequence[int] = ()) -> Part:
        return Part([*self._tokens[sequence][start:end], *drafts], start, self._tables[sequence])

    def _logits(self, parts: list[Part]) -> list[Tensor]:
        return self._steps.logits(parts, self._length)

    def chunks(self, size: int) -> int:
        """Returns the positions that differ when they are computed `size` at a time, over another prompt's cache."""
        starts = range(0, self._length, size)
        got = [self._logits([self._part(0, start, min(start + size, self._length))])[0] for start in starts]
        return different(torch.cat(got), self.wanted)

    def batches(self) -> int:
        """Returns the positions that differ in steps with chunks, decoding rows and drafts of other sequences."""
        places, got = [0] * len(self._tables), []
        while places[0] < self._length:
            parts, kept = [], 0
            for sequence in range(len(places)):
                most = self._length - places[sequence]
                number = min(self._rng.choice([1, 1, 1, 2, 8, 40, 130]), most)
                if not number:
                    continue
                drafts = self._random_tokens(self._rng.randint(0, 7)) if number == 1 else []
                parts.append(self._part(sequence, places[sequence], places[sequence] + number, drafts))
                places[sequence] += number
                kept = number if sequence == 0 else kept
            got.append(self._logits(parts)[0][:kept])
        return different(torch.cat(got), self.wanted)

    def hits(self) -> int:
        """Returns the positions behind each block of a prefix that another request has computed, which differ."""
        self.chunks(7)
        starts = range(16, self._length, 16)
        return sum(
            different(self._logits([self._part(0, start, min(start + 5, self._length))])[0], self.wanted[start:][:5])
            for start in starts
        )

    def not_finite_behind(self) -> int:
        """Returns whether a position differs before a draft whose values are not finite."""
        self._logits([self._part(0, 0, 20)])
        embeddings = self.backend._decoder.embeddings  # type: ignore[attr-defined]
        kept = embeddings[5].clone()
        embeddings[5] = torch.nan
        got = self._logits([self._part(0, 20, 21, [5, 5])])[0][:1]
        embeddings[5] = kept
        return different(got, self.wanted[20:21]) if self._tokens[0][20] != 5 else 0
