"""A fast path for plans that draft as the last one did: the same rows without start, each with as many drafts.

As `plan_continuation`: the check of the last plan covers the next one too, except for new blocks and the remaining
room, which depends on what results have confirmed since.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import SAMPLE_FLAG
from roster_protos import plan_pb2
from runner_svc.batch.plan_check import Limits, SlotCounters
from runner_svc.batch.plan_continuation import Appends
from runner_svc.batch.plan_copies import has_copies
from runner_svc.interface.step import StepBatch

_NO_START = np.full(1, -1, "<i4").tobytes()
_SAMPLE = bytes([SAMPLE_FLAG])


@dataclass(slots=True, eq=False)
class DraftedContinuation:
    """State after a plan whose rows all had no start, some with drafts, while none of their sequences has failed."""

    batch: StepBatch
    epochs: NDArray[np.int64]  # [R]
    plan: plan_pb2.Plan
    drafts = True

    @classmethod
    def after(cls, plan: plan_pb2.Plan, batch: StepBatch, epochs: NDArray[np.int64]) -> DraftedContinuation | None:
        """Returns the state after `plan`, or None unless all of its rows are in `batch`, drafting or with spread."""
        flags = plan.extent_flags
        if not plan.extent_drafts or flags != _SAMPLE * len(flags) or plan.extent_starts != _NO_START * len(flags):
            return None
        if len(batch.slots) < len(flags) or plan.extent_forced:
            return None
        return cls(batch, epochs, plan)

    def follows(self, plan: plan_pb2.Plan) -> bool:
        """Returns whether the plan has the expected rows and otherwise only appends blocks."""
        last = self.plan
        return (
            plan.extent_drafts == last.extent_drafts
            and plan.extent_slots == last.extent_slots
            and plan.extent_starts == last.extent_starts
            and plan.extent_counts == last.extent_counts
            and plan.extent_flags == last.extent_flags
            and not (plan.releases or plan.admissions or plan.copy_sources or plan.copy_targets or has_copies(plan))
            and not (plan.extent_forced or plan.forced_tokens)
        )

    def advance(self, plan: plan_pb2.Plan, appends: Appends, counters: SlotCounters, limits: Limits) -> bool:
        """Advances `batch` and the counters by a plan that `follows`, with its appends.

        Returns False, with nothing changed, if the plan needs the full check.
        """
        batch = self.batch
        slots = batch.slots
        if len(appends.slots):
            if not appends.fit(counters, limits):
                return False
            counters.num_blocks[appends.slots] += 1
        known = counters.num_tokens[slots]
        highest = known + counters.spread[slots] - 1
        ends = highest + batch.counts
        fits = (ends <= counters.num_blocks[slots] * limits.block_size) & (ends < limits.context_length)
        if not (fits & (counters.computed[slots] == highest)).all():
            counters.num_blocks[appends.slots] -= 1
            return False
        self.batch = replace(batch, lowest=known - 1, highest=highest)
        counters.computed[slots] = ends
        counters.num_tokens[slots] += 1
        counters.spread[slots] += batch.drafts
        return True
