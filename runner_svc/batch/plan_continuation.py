"""A fast path for plans that continue the last one: the same rows, each one position further, all sampling.

Nearly every plan between arrivals and ends of sequences is like this. The check of the last plan then covers it too,
except for new blocks and the remaining room, so that most of `PlanCheck` and of the batch is not repeated. Any other
plan, including a faulty one, is left to the slow path of `BatchState.apply`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import SAMPLE_FLAG
from roster_protos import plan_pb2
from runner_svc.batch.plan_check import Limits, SlotCounters
from runner_svc.batch.plan_copies import has_copies
from runner_svc.interface.step import StepBatch

_ONE = np.ones(1, "<i4").tobytes()
_SAMPLE = bytes([SAMPLE_FLAG])


@dataclass(slots=True, eq=False)
class Appends:
    """A plan's appends to block tables, int32 [A] each."""

    slots: NDArray[np.int32]
    indexes: NDArray[np.int32]
    blocks: NDArray[np.int32]

    @classmethod
    def read(cls, plan: plan_pb2.Plan) -> Appends | None:
        """Returns views into the plan's bytes, or None if their lengths disagree."""
        columns = plan.append_slots, plan.append_indexes, plan.append_blocks
        if len({len(column) for column in columns}) > 1 or len(columns[0]) % 4:
            return None
        return cls(*(np.frombuffer(column, "<i4") for column in columns))

    def fit(self, counters: SlotCounters, limits: Limits) -> bool:
        """Returns whether each append is valid: at the end of a resident sequence's table, at most one per sequence."""
        slots, indexes, blocks = self.slots, self.indexes, self.blocks
        if slots.min() < 0 or slots.max() >= limits.num_slots or len(set(slots.tolist())) < len(slots):
            return False
        if blocks.min() < 1 or blocks.max() > limits.num_blocks or indexes.max() >= limits.max_table:
            return False
        return bool((indexes == counters.num_blocks[slots]).all() and counters.resident[slots].all())


@dataclass(slots=True, eq=False)
class PlanContinuation:
    """State after a plan whose rows all decoded, while none of their sequences has failed."""

    batch: StepBatch
    epochs: NDArray[np.int64]  # [R]
    # Columns of the next plan.
    slots: bytes
    starts: bytes
    counts: bytes
    flags: bytes
    # Number of further positions for which every row has blocks and context.
    room: int
    drafts = False

    @classmethod
    def after(
        cls,
        plan: plan_pb2.Plan,
        batch: StepBatch,
        epochs: NDArray[np.int64],
        counters: SlotCounters,
        limits: Limits,
    ) -> PlanContinuation | None:
        """Returns the state after `plan`, or None unless all of its rows are in `batch` and decode without drafts."""
        counts, flags = plan.extent_counts, plan.extent_flags
        if counts != _ONE * len(flags) or flags != _SAMPLE * len(flags) or len(batch.slots) < len(flags):
            return None
        if plan.extent_drafts or (limits.max_drafts and batch.starts.min() < 0):
            return None
        continuation = cls(batch, epochs, plan.extent_slots, batch.ends.tobytes(), counts, flags, 0)
        continuation.room = continuation._room(counters, limits)
        return continuation

    def follows(self, plan: plan_pb2.Plan) -> bool:
        """Returns whether the plan has the expected rows and otherwise only appends blocks."""
        return (
            plan.extent_starts == self.starts
            and plan.extent_slots == self.slots
            and plan.extent_counts == self.counts
            and plan.extent_flags == self.flags
            and not (plan.releases or plan.admissions or plan.copy_sources or plan.copy_targets or has_copies(plan))
            and not (plan.extent_drafts or plan.extent_forced or plan.forced_tokens)
        )

    def advance(self, plan: plan_pb2.Plan, appends: Appends, counters: SlotCounters, limits: Limits) -> bool:
        """Advances `batch` and the counters by a plan that `follows`, with its appends.

        Returns False, with nothing changed, if the plan needs the full check.
        """
        room = self.room
        if len(appends.slots):
            if not appends.fit(counters, limits):
                return False
            counters.num_blocks[appends.slots] += 1
            room = self._room(counters, limits)
        if room < 1:
            counters.num_blocks[appends.slots] -= 1
            return False
        self.batch = replace(self.batch, starts=np.frombuffer(plan.extent_starts, "<i4"))
        ends = self.batch.ends
        counters.computed[self.batch.slots] = ends
        counters.num_tokens[self.batch.slots] += 1
        self.starts = ends.tobytes()
        self.room = room - 1
        return True

    def _room(self, counters: SlotCounters, limits: Limits) -> int:
        ends = self.batch.ends
        in_blocks = counters.num_blocks[self.batch.slots] * limits.block_size - ends
        # The last position of the context is never computed: there is no position for the token after it.
        return min(int(in_blocks.min()), limits.context_length - 1 - int(ends.max()))
