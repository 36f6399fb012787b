"""A drafter of the hash backend, for tests and benchmarks: it knows the next tokens."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from runner_svc.backends.hash_backend import KV_BASE, HashBackend
from runner_svc.interface.backend import AdmittedSlot
from runner_svc.interface.step import StepBatch
from runner_svc.sampling.noise import MASK64, mix64


class OracleDrafter:
    """Proposes the tokens that the hash backend is about to pick, each wrong with probability `wrong`.

    It continues the hash from the KV in the row's blocks, which takes some microseconds per token. Set `backend` before
    the first step.
    """

    name = "oracle"
    backend: HashBackend

    def __init__(self, rng: random.Random, wrong: float = 0.3) -> None:
        self._rng, self._wrong = rng, wrong

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = np.full((len(slots), most.max()), -1, np.int32)
        vocabulary = self.backend.model.vocab_size
        for row, (slot, count) in enumerate(zip(slots.tolist(), most.tolist(), strict=True)):
            for place, token in enumerate(self._next(tokens[slot], slot, int(counters[row]), count)):
                wrong = self._rng.random() < self._wrong
                proposals[row, place] = (token + self._rng.randrange(1, vocabulary)) % vocabulary if wrong else token
        return proposals

    def _next(self, tokens: NDArray[np.int32], slot: int, known: int, count: int) -> list[int]:
        """Returns the next `count` tokens; leaves them behind the known ones, where penalties look for drafts."""
        backend, position = self.backend, known - 1
        blocks = backend.host_slots.tables[slot, : -(-known // backend.block_size)]
        sums = backend._kv[blocks].reshape(-1)[:position]
        with np.errstate(over="ignore"):
            context_hash = int((sums * backend._powers_b[:position]).sum(dtype=np.uint64))
        running = int(sums[-1]) if position else 0
        row = _OneRow(backend.host_slots.admitted[slot])
        for place in range(position, position + count):
            running = (running + mix64(int(tokens[place]) + 1) * pow(KV_BASE, place, 1 << 64)) & MASK64
            context_hash = (context_hash + running * int(backend._powers_b[place])) & MASK64
            tokens[place + 1] = backend._pick(row, 0, place + 1, context_hash)
        return tokens[known : known + count].tolist()


class _OneRow(StepBatch):
    """The part of a batch that picking a token reads."""

    def __init__(self, admitted: AdmittedSlot) -> None:
        self.params, self.states = np.array([admitted.params]), [admitted.state]
