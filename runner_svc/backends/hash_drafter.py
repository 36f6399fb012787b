"""Drafters of the hash backend, for tests and benchmarks: one knows the next tokens, one is a draft model.

The draft model is the hash model with KV of its own under the same block ids. So what it drafts is right if it read the
right KV, and wrong if any position before was not computed, or was computed from a draft that was wrong.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from runner_svc.backends.hash_backend import KV_BASE, HashBackend
from runner_svc.backends.model_drafter import ModelDrafter
from runner_svc.drafting.draft_counters import DraftCounters
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
        """Ranks of a group give the same `rng`, so that they propose the same."""
        self._rng, self._wrong = rng, wrong
        self._began = rng.getstate()

    def regroup(self) -> None:
        """As `Regrouping.regroup`."""
        self._rng.setstate(self._began)

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = np.full((len(slots), most.max()), -1, np.int32)
        vocabulary = self.backend.model.vocab_size
        hashes = self._hashes(slots, counters)
        for row, (slot, count) in enumerate(zip(slots.tolist(), most.tolist(), strict=True)):
            for place, token in enumerate(self._next(tokens[slot], slot, int(counters[row]), count, *hashes[row])):
                wrong = self._rng.random() < self._wrong
                proposals[row, place] = (token + self._rng.randrange(1, vocabulary)) % vocabulary if wrong else token
        return proposals

    def _hashes(self, slots: NDArray[np.int32], counters: NDArray[np.int32]) -> list[tuple[int, int]]:
        """Returns for each slot the running hash and the context's, before its last known token."""
        backend, partial = self.backend, np.zeros((len(slots), 2), np.uint64)
        for row, (slot, known) in enumerate(zip(slots.tolist(), counters.tolist(), strict=True)):
            blocks = backend.host_slots.tables[slot, : -(-known // backend.block_size)]
            sums = backend._kv[blocks].reshape(-1)[: known - 1]
            if known > 1:
                with np.errstate(over="ignore"):
                    partial[row] = sums[-1], (sums * backend._powers_b[: known - 1]).sum(dtype=np.uint64)
        return [(running, context) for running, context in backend.shares.summed(partial).tolist()]

    def _next(
        self, tokens: NDArray[np.int32], slot: int, known: int, count: int, running: int, context_hash: int
    ) -> list[int]:
        """Returns the next `count` tokens; leaves them behind the known ones, where penalties look for drafts."""
        backend, position = self.backend, known - 1
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


class HashDraftModel:
    """Implements `runner_svc.backends.model_drafter.DraftModel`."""

    def __init__(self, target: HashBackend, context_length: int) -> None:
        """`context_length`: most positions of a sequence; at most the target's."""
        self.context_length = context_length
        self._kv = type(target)(
            num_slots=1,
            block_size=target.block_size,
            num_blocks=target.num_blocks,
            vocab_size=target.model.vocab_size,
            context_length=target.model.context_length,
            eos_probability=target.eos_probability,
        )
        self._kv.host_slots = target.host_slots

    def draw(self, batch: StepBatch) -> NDArray[np.int32]:
        """As `DraftModel.draw`."""
        return np.array(self._kv.computed(batch), np.int32)

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """As `DraftModel.copy_blocks`."""
        self._kv._kv[targets] = self._kv._kv[sources]


def hash_model_drafter(target: HashBackend, context_length: int | None = None) -> ModelDrafter:
    """Returns a drafter with a `HashDraftModel`; `context_length`: its own, by default the target's."""
    model = HashDraftModel(target, context_length or target.model.context_length)
    counters = DraftCounters(target.num_slots, target.num_blocks, target.block_size)
    return ModelDrafter("model:hash", model, counters, target.num_slots, target.block_size)
