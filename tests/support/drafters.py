"""Drafters of tests: one that lies, one that knows the texts, a draft model that is checked, and mixtures of them."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.hash_drafter import HashDraftModel, OracleDrafter
from runner_svc.backends.model_drafter import CATCH_UP, ModelDrafter
from runner_svc.drafting.draft_counters import DraftCounters
from runner_svc.drafting.drafter import Drafter, LateDrafter, SlotDrafter
from runner_svc.drafting.ngram import NgramDrafter
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.step import DoneStep, StepBatch
from runner_svc.sampling.noise import mix64_array

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


class WrongDraft(BaseException):
    """Of a draft model that should be right; no runner survives it."""


class CheckedDraftModel(HashDraftModel):
    """Checks each draw against the tokens before it: it is right if all KV before it was computed from these tokens.

    Then it makes some of them wrong, so that it goes on from wrong drafts.
    """

    def __init__(self, rng: random.Random, target: HashBackend, context_length: int, wrong: float = 0.2) -> None:
        super().__init__(target, context_length)
        self._rng, self._wrong = rng, wrong
        self.passes: list[list[int]] = []
        """Positions of each row of each pass."""

    def draw(self, batch: StepBatch) -> NDArray[np.int32]:
        self.passes.append(batch.counts.tolist())
        if (batch.ends > self.context_length).any():
            raise WrongDraft(f"position {batch.ends.max() - 1} of a context of {self.context_length}")
        drawn, rows = super().draw(batch), np.flatnonzero(batch.sample).tolist()
        right = [self._right(batch, row) for row in rows]
        if drawn.tolist() != right:
            raise WrongDraft(f"{drawn.tolist()} instead of {right} at {batch.ends.tolist()}")
        vocab_size = self._kv.model.vocab_size
        lies = [self._rng.randrange(vocab_size) if self._rng.random() < self._wrong else token for token in right]
        return np.array(lies, np.int32)

    def _right(self, batch: StepBatch, row: int) -> int:
        backend, end = self._kv, int(batch.ends[row])
        tokens = batch.states[row].tokens[:end].astype(np.uint64) + np.uint64(1)
        sums = np.cumsum(mix64_array(tokens) * backend._powers_a[:end], dtype=np.uint64)
        context_hash = int((sums * backend._powers_b[:end]).sum(dtype=np.uint64))
        return backend._pick(batch, row, end, context_hash)


def checked_model(
    rng: random.Random,
    backend: HashBackend,
    context_length: int | None = None,
    *,
    wrong: float = 0.2,
    catch_up: int = CATCH_UP,
) -> ModelDrafter:
    """Returns a drafter of a `CheckedDraftModel`; arguments as those of this and of `ModelDrafter`."""
    sizes = backend.num_slots, backend.block_size
    counters = DraftCounters(sizes[0], backend.num_blocks, sizes[1])
    model = CheckedDraftModel(rng, backend, context_length or backend.model.context_length, wrong)
    return ModelDrafter("model:hash", model, counters, *sizes, catch_up=catch_up)


class MixedDrafter:
    """Asks a random one of `drafters` for each row, and drops a random part of what it proposes."""

    name = "mixed"

    def __init__(self, rng: random.Random, drafters: list[Drafter]) -> None:
        self._rng, self._drafters = rng, drafters
        self._followers = [drafter for drafter in drafters if isinstance(drafter, SlotDrafter)]

    def change(self, changes: SlotChanges, tables: NDArray[np.int32]) -> None:
        for follower in self._followers:
            follower.change(changes, tables)

    def settle(self, slots: NDArray[np.int32], counters: NDArray[np.int32]) -> None:
        for follower in self._followers:
            follower.settle(slots, counters)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        for follower in self._followers:
            follower.copy_blocks(sources, targets)

    def forget_blocks(self, blocks: NDArray[np.int32]) -> None:
        for follower in self._followers:
            follower.forget_blocks(blocks)

    def catch_up(self, tokens: NDArray[np.int32], slots: NDArray[np.int32], counters: NDArray[np.int32]) -> None:
        for follower in self._followers:
            if isinstance(follower, LateDrafter):
                follower.catch_up(tokens, slots, counters)

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
    state = rng.getrandbits(32)
    for each in getattr(backend, "ranks", [backend]):  # the ranks of a group draft alike
        own = random.Random(state)
        drafters: list[Drafter] = [NgramDrafter(), NgramDrafter(), LyingDrafter(own, backend.model.vocab_size)]
        each.host_slots.draft_with(MixedDrafter(own, drafters))
        each.max_drafts, each.drafter_name = max_drafts, "mixed"
    backend.max_drafts, backend.drafter_name = max_drafts, "mixed"


def drafting_backend(
    kind: type[B], rng: random.Random, *, wrong: float = 0.3, lies: bool = True, max_drafts: int = 5, **options: Any
) -> B:
    """Returns a backend of `kind` with an `OracleDrafter`, if `lies` mixed with a `LyingDrafter` and a draft model.

    `options` are those of `HashBackend`.
    """
    oracle = OracleDrafter(rng, wrong)
    backend = kind(drafter=oracle, max_drafts=max_drafts, **options)
    oracle.backend = backend
    if lies:
        context_length = backend.model.context_length // rng.choice([1, 1, 2])
        model = checked_model(rng, backend, context_length, catch_up=rng.choice([3, 12, CATCH_UP]))
        liar = LyingDrafter(rng, options.get("vocab_size", 259))
        backend.draft_with(MixedDrafter(rng, [oracle, oracle, model, model, liar]), max_drafts)
    return backend
