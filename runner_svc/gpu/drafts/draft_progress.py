"""What a host knows of a draft model's KV on the device, before it knows what was accepted.

After a drafting pass a slot's KV lacks at most its last two tokens, whatever was accepted. Each step of the slot
without one adds a token that lacks. So the number of tokens that lack has a bound without the counter, and the first
pass over the last few known tokens (`draft_model.FIRST`) makes up for a few. Rows that lack more catch up in a pass of
their own, over positions that the host knows: those below the lower bound of the counter. That bound is exact for a
row which has not drafted since it was admitted, whatever its plans asked for.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from runner_svc.drafting.draft_counters import DraftCounters
from runner_svc.gpu.drafts.draft_model import FIRST
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.step import StepBatch

_FAR = 1 << 20
"""Tokens that lack where nothing is known."""
_USUAL = 2
"""Tokens that lack after a drafting pass, at most."""


class DraftProgress:
    """Bounds by slot, and the marks of blocks."""

    def __init__(
        self, num_slots: int, max_table: int, num_blocks: int, block_size: int, context_length: int, by_prompt: bool
    ) -> None:
        """`context_length`: the draft model's. `by_prompt`: as of `DraftCounters`."""
        self.counters = DraftCounters(num_slots, num_blocks, block_size, by_prompt=by_prompt)
        self._lacks = np.full(num_slots, _FAR, np.int32)
        self._known = np.full(num_slots, -1, np.int32)  # counters once all steps so far are done; -1: only bounds are
        self._tables = np.zeros((num_slots + 1, max_table), np.int32)
        self._context_length = context_length

    def change(self, changes: SlotChanges) -> None:
        """Follows admissions, then appends."""
        for admitted in changes.admitted:
            self._tables[admitted.state.slot, : len(admitted.blocks)] = admitted.blocks
            self._lacks[admitted.state.slot], self._known[admitted.state.slot] = _FAR, admitted.num_tokens
        if len(changes.append_slots):
            self._tables[changes.append_slots, changes.append_indexes] = changes.append_blocks
        self.counters.change(changes, self._tables)

    def skipped(self, slots: NDArray[np.int32]) -> None:
        """Notes that `slots` [L] got a token each in a step without a drafting pass."""
        self._lacks[slots] = np.minimum(self._lacks[slots] + 1, _FAR)
        self._known[slots] += self._known[slots] >= 0

    def drafted(self, batch: StepBatch) -> None:
        """Notes a drafting pass over the rows of the batch: those that lack too much stay where they are."""
        self._known[batch.slots] += self._known[batch.slots] >= 0
        self._known[batch.slots[batch.drafts > 0]] = -1
        ready = self._lacks[batch.slots] <= FIRST
        slots, lowest = batch.slots[ready], batch.lowest[ready]
        self._lacks[slots] = _USUAL
        seen = np.maximum(self.counters.drafted[slots], np.minimum(lowest, self._context_length))
        self.counters.advance(slots, seen.astype(np.int32))
        self.counters.settle(slots, (seen + 1).astype(np.int32))

    def catch_up(self, batch: StepBatch, most: int) -> tuple[StepBatch, StepBatch | None]:
        """Returns the batch without the drafts of rows that can't catch up now, and the positions that rows missed.

        Of `most` positions, the rows that miss least get theirs first.
        """
        asks = np.flatnonzero((batch.drafts > 0) & (self._lacks[batch.slots] > FIRST))
        if not len(asks):
            return batch, None
        slots = batch.slots[asks]
        known = self._known[slots]  # else bounds of the counters
        lowest, highest = (np.where(known >= 0, known, each[asks] + 1) for each in (batch.lowest, batch.highest))
        starts, ends = self.counters.drafted[slots], np.minimum(lowest, self._context_length)
        missed = np.maximum(ends - starts, 0)
        order = np.argsort(missed, kind="stable")
        before = np.cumsum(missed[order]) - missed[order]
        counts = np.zeros_like(missed)
        counts[order] = np.clip(most - before, 0, missed[order])
        done = counts == missed
        self.counters.advance(slots, (starts + counts).astype(np.int32))
        self.counters.settle(slots, (starts + counts + 1).astype(np.int32))
        lacks = highest - lowest
        self._lacks[slots[done]] = lacks[done]
        drafts, row_counts = batch.drafts.copy(), batch.counts.copy()
        still = asks[~(done & (lacks <= FIRST))]
        drafts[still], row_counts[still] = 0, 1
        cut = replace(batch, drafts=drafts, counts=row_counts)
        rows = counts > 0
        if not rows.any():
            return cut, None
        chosen = asks[rows]
        return cut, replace(
            batch,
            slots=slots[rows],
            starts=starts[rows].astype(np.int32),
            counts=counts[rows].astype(np.int32),
            sample=np.zeros(int(rows.sum()), np.bool_),
            params=batch.params[chosen],
            states=[batch.states[row] for row in chosen.tolist()],
            awaits=np.zeros(0, np.intp),
            drafts=np.zeros(0, np.int32),
            lowest=np.zeros(0, np.int32),
            highest=np.zeros(0, np.int32),
        )
