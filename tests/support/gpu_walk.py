"""Ways to compute positions on a GPU, compared in every bit with whole prompts: see tests/gpu/test_determinism.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from tests.support.gpu_passes import Part, Passes, different

MOST_WATCHED = 16
"""Slots whose positions are compared."""
MOST_CHUNKS = 8192
"""Most positions of a step's chunks that are drawn here."""


class Walk:
    """The logits of some slots' positions, each in one chunk, compared with other ways to compute them."""

    def __init__(self, passes: Passes, length: int, slots: int, rng: random.Random) -> None:
        self._passes, self._length, self.slots, self.random = passes, length, slots, rng
        self._watched = range(MOST_WATCHED)
        self.wanted = [passes.mixed([Part(slot, 0, length)])[0] for slot in self._watched]
        self.compared = 0

    def chunks(self, size: int, end: int | None = None, slot: int = 0) -> int:
        """Returns the positions that differ when they are computed `size` at a time over a new cache."""
        faults, end = 0, min(end or self._length, self._length)
        for start in range(0, end, size):
            part = Part(slot, start, min(size, end - start))
            faults += self._compare([part], self._passes.mixed([part]))
        return faults

    def fill(self) -> None:
        """Computes all positions of the slots that are not watched."""
        for slot in range(len(self._watched), self.slots):
            self._passes.mixed([Part(slot, 0, self._length)])

    def decodes(self, batch: int, *, captured: bool) -> int:
        """Returns the positions that differ in a step of `batch` decoding rows, padded to a bucket."""
        parts = [Part(slot, self.random.randrange(self._length), 1) for slot in self._slots_of(batch)]
        bucket = min(self.slots, batch + self.random.choice((0, 0, 3)))
        return self._compare(parts, self._passes.decode(parts, bucket=bucket, captured=captured))

    def verifies(self, stride: int, batch: int, *, captured: bool) -> int:
        """Returns the same of a step whose rows verify `stride` - 1 drafts, which are the true tokens."""
        last = self._length - stride
        parts = [Part(slot, self.random.randrange(last), stride) for slot in self._slots_of(batch)]
        return self._compare(parts, self._passes.verify(parts, captured=captured))

    def mixes(self, batch: int, chunks: tuple[int, ...], *, captured: bool) -> int:
        """Returns the same of a step of `batch` decoding rows, some of them watched, and chunks of other slots."""
        slots = self._slots_of(batch)
        parts = [Part(slot, self.random.randrange(self._length), 1) for slot in slots]
        others = [slot for slot in range(self.slots) if slot not in slots]
        for slot, count in zip(self.random.sample(others, len(chunks)), chunks, strict=True):
            count = min(count, self._length)
            parts.append(Part(slot, self.random.randrange(self._length - count + 1), count))
        self.random.shuffle(parts)
        padded = self.random.choice((0, 5, 70))
        return self._compare(parts, self._passes.mixed(parts, padded=padded, captured=captured))

    def hits(self, slot: int = 0) -> int:
        """Returns the positions behind each block of a slot's prefix, shared by another slot, that differ."""
        faults, last = 0, self.slots - 1
        for start in range(16, self._length - 5, 16 * max(1, self._length // 400)):
            self._passes.share(last, slot, start)
            parts = [Part(last, start, 5)]
            faults += self._compare([Part(slot, start, 5)], self._passes.mixed(parts))
        return faults

    def alone(self, count: int) -> int:
        """Returns the positions that differ of `count` ones, each decoded alone, of a slot after another."""
        faults = 0
        for index in range(count):
            part = Part(index // self._length % len(self._watched), index % self._length, 1)
            faults += self._compare([part], self._passes.decode([part]))
        return faults

    def chunks_among(self, batch: int, size: int) -> int:
        """Returns the same of chunks of watched slots, of `size` positions in all, among decoding rows of others."""
        slots = self.random.sample(range(len(self._watched), self.slots - 1), batch)
        parts = [Part(slot, self.random.randrange(self._length), 1) for slot in slots]
        watched = self.random.sample(self._watched, len(self._watched))
        while size > 0 and watched:
            count = min(size, self._length)
            parts.append(Part(watched.pop(), self.random.randrange(self._length - count + 1), count))
            size -= count
        self.random.shuffle(parts)
        return self._compare(parts, self._passes.mixed(parts))

    def recomputes(self, slot: int) -> int:
        """Returns the same of a slot that loses its blocks, and is computed in others, in chunks of any sizes."""
        faults, start = 0, 0
        self._passes.renew(slot, self.slots - 1)
        while start < self._length:
            count = min(self.random.choice((1, 5, 16, 100, 256, 700)), self._length - start)
            others = [
                Part(other, self.random.randrange(self._length), 1)
                for other in range(20, 29)[: self.random.randrange(9)]
            ]
            parts = [*others, Part(slot, start, count)]
            faults += self._compare(parts, self._passes.mixed(parts))
            start += count
        return faults

    def all_ways(self) -> dict[str, int]:
        """Returns the positions that differ in each of WAYS."""
        return {name: sum(way(self)) for name, way in WAYS.items()}

    def _slots_of(self, batch: int) -> list[int]:
        watched = [slot for slot in self._watched if slot < batch]
        others = self.random.sample(range(len(self._watched), self.slots - 1), batch - len(watched))
        return self.random.sample(watched + others, batch)

    def _compare(self, parts: list[Part], got: list[Tensor]) -> int:
        pairs = [pair for pair in zip(parts, got, strict=True) if pair[0].slot in self._watched]
        if not pairs:
            return 0
        self.compared += sum(part.count for part, _ in pairs)
        wanted = [self.wanted[part.slot][part.start : part.end] for part, _ in pairs]
        return different(torch.cat([logits for _, logits in pairs]), torch.cat(wanted))  # one wait for the GPU


WAYS: dict[str, Callable[[Walk], Iterator[int]]] = {
    "chunks": lambda walk: (
        walk.chunks(size, end, slot)
        for slot in range(5)
        for size, end in ((1, 40), (16, 320), (100, None), (2048, None))
    ),
    "decoding": lambda walk: (
        walk.decodes(batch, captured=captured)
        for batch in (1, 2, 3, 8, 17, 33, 60)
        for captured in (False, True)
        for _ in range(3)
    ),
    "many decoding": lambda walk: (
        walk.decodes(min(batch, walk.slots - 5), captured=False) for batch in (64, 100, 128, 130, 200, 251)
    ),
    "mixed": lambda walk: (
        walk.mixes(batch, chunks, captured=captured)
        for batch, chunks in ((1, (16,)), (5, (100, 2)), (30, (1, 700)), (12, (2048, 17)), (50, (300, 300, 300)))
        for captured in (False, True)
    ),
    "verifying": lambda walk: (
        walk.verifies(stride, batch, captured=captured)
        for stride in (2, 4, 6, 8)
        for batch in (1, 7, 40)
        for captured in (False, True)
    ),
    "prefix hits": lambda walk: (walk.hits() for _ in range(1)),
}


def _beside_decoding(size: int, walk: Walk, turn: int) -> int:
    return walk.chunks_among((0, 1, 12, 60)[turn % 4], walk.random.randint(1, size) if turn % 3 else size)


def _decoding(batches: tuple[int, ...], captured: bool, walk: Walk, turn: int) -> int:
    return walk.decodes(batches[turn % len(batches)], captured=captured)


def _mixed(walk: Walk, turn: int) -> int:
    return walk.mixes(40, ((16,), (100, 2), (1, 700), (2048, 17))[turn % 4], captured=False)


def _verifying(stride: int, walk: Walk, turn: int) -> int:
    return walk.verifies(stride, (16, 40, 60)[turn % 3], captured=turn % 16 == 0)


LONG_WAYS: dict[str, Callable[[Walk, int], int]] = {
    "chunks of 16": lambda walk, turn: walk.chunks(16, None, turn % MOST_WATCHED),
    "chunks of 100": lambda walk, turn: walk.chunks(100, None, turn % MOST_WATCHED),
    "chunks of 2048": lambda walk, turn: walk.chunks(2048, None, turn % MOST_WATCHED),
    "2 to 256 decoding": partial(_decoding, (2, 3, 8, 17, 33, 64, 100, 128, 200, 256), False),
    "2 to 256 decoding, captured": partial(_decoding, (2, 8, 17, 64, 128, 256), True),
    "decoding beside chunks": _mixed,
    **{f"chunks of 1 to {size} beside decoding": partial(_beside_decoding, size) for size in (100, 2048, 8192)},
    "prefix hits": lambda walk, turn: walk.hits(turn % MOST_WATCHED),
    "recomputed": lambda walk, turn: walk.recomputes(turn % MOST_WATCHED),
    **{f"verifying {stride}": partial(_verifying, stride) for stride in range(2, 9)},
}
"""A turn of each way; as many are taken as the wanted number of positions needs."""
