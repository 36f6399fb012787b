"""Drafters of tests: one that lies, one that knows the texts, and mixtures of random lengths."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.hash_drafter import OracleDrafter
from runner_svc.drafting.drafter import Drafter
from runner_svc.drafting.ngram import NgramDrafter
from runner_svc.interface.step import DoneStep, StepBatch

B = TypeVar("B", bound=HashBackend)


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


class Prophet:
    """Proposes what follows in the whole texts that it has, each token wrong with some probability."""

    name = "prophet"

    def __init__(self, rng: random.Random, vocab_size: int, wrong: float) -> None:
        self.texts: list[list[int]] = []
        self._rng, self._vocab_size, self._wrong = rng, vocab_size, wrong

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = np.full((len(slots), most.max()), -1, np.int32)
        for row, (slot, known, count) in enumerate(zip(slots.tolist(), counters.tolist(), most.tolist(), strict=True)):
            text = tokens[slot, :known].tolist()
            whole = next((whole for whole in self.texts if whole[:known] == text), text)
            for place, token in enumerate(whole[known : known + count]):
                wrong = self._rng.random() < self._wrong
                proposals[row, place] = self._rng.randrange(self._vocab_size) if wrong else token
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


def let_draft(backend: Any, rng: random.Random, max_drafts: int = 5) -> None:
    """Lets a backend on the CPU that computes a model draft n-grams, of which tiny models repeat many, and lies."""
    drafters: list[Drafter] = [NgramDrafter(), NgramDrafter(), LyingDrafter(rng, backend.model.vocab_size)]
    backend.host_slots.draft_with(MixedDrafter(rng, drafters))
    backend.max_drafts, backend.drafter_name = max_drafts, "mixed"


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
