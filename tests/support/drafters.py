"""Drafters for the hash backend: one that knows the next tokens, one that lies, and mixtures of random lengths."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from runner_svc.backends.hash_backend import _A as A
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.drafting.drafter import Drafter
from runner_svc.interface.backend import AdmittedSlot
from runner_svc.interface.step import DoneStep, StepBatch
from runner_svc.sampling.noise import MASK64, mix64

B = TypeVar("B", bound=HashBackend)


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
            running = (running + mix64(int(tokens[place]) + 1) * pow(A, place, 1 << 64)) & MASK64
            context_hash = (context_hash + running * int(backend._powers_b[place])) & MASK64
            tokens[place + 1] = backend._pick(row, 0, place + 1, context_hash)
        return tokens[known : known + count].tolist()


class _OneRow(StepBatch):
    """The part of a batch that picking a token reads."""

    def __init__(self, admitted: AdmittedSlot) -> None:
        self.params, self.states = np.array([admitted.params]), [admitted.state]


class LyingDrafter:
    """Proposes arbitrary ids, also outside the vocabulary, with gaps, and more than a row may draft."""

    name = "lying"

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng, self._vocab_size = np.random.default_rng(rng.getrandbits(32)), vocab_size

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = self._rng.integers(0, self._vocab_size, (len(slots), most.max()), np.int32)
        odd = self._rng.random(proposals.shape) < 0.1
        proposals[odd] = self._rng.choice([-1, -7, self._vocab_size, 2**31 - 1, -(2**31)], odd.sum())
        return proposals


class MixedDrafter:
    """Asks a random one of `drafters` for each row, and drops a random part of what it proposes."""

    name = "mixed"

    def __init__(self, rng: random.Random, drafters: list[Drafter]) -> None:
        self._rng, self._drafters = rng, drafters

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        choices = np.array([self._rng.randrange(len(self._drafters)) for _ in slots])
        proposals = np.full((len(slots), most.max()), -1, np.int32)
        for index, drafter in enumerate(self._drafters):
            rows = np.flatnonzero((choices == index) & (most > 0))
            if len(rows):
                made = drafter.propose(tokens, slots[rows], counters[rows], most[rows])
                proposals[rows, : made.shape[1]] = made
        for row in range(len(slots)):
            if self._rng.random() < 0.3:
                proposals[row, self._rng.randint(0, int(most[row])) :] = -1
        return proposals


class LateHash(HashBackend):
    """The hash backend as one that overlaps: the runner records a plan only when its result is taken."""

    def launch(self, batch: StepBatch) -> DoneStep:
        return DoneStep(self.step(batch))


def drafting_backend(
    kind: type[B], rng: random.Random, *, wrong: float = 0.3, lies: bool = True, max_drafts: int = 5, **options: Any
) -> B:
    """Returns a backend of `kind` with an `OracleDrafter`, mixed with a `LyingDrafter` if `lies`.

    `options` are those of `HashBackend`.
    """
    oracle = OracleDrafter(rng, wrong)
    drafter: Drafter = oracle
    if lies:
        drafter = MixedDrafter(rng, [oracle, oracle, LyingDrafter(rng, options.get("vocab_size", 259))])
    backend = kind(drafter=drafter, max_drafts=max_drafts, **options)
    oracle.backend = backend
    return backend
