"""The runner's roster: which sequence is in which slot, block tables, and the token buffer that decode steps read.

A plan is checked whole before anything changes (`PlanCheck`, which works on copies of the small counters), then applied
in the fixed order releases, admissions, table appends; the copies and extents are handed to the backend as arrays. Work
per row is numpy, never a Python loop: a loop runs only over admissions and over rows' `SlotState` references.

The token buffer and the block tables are allocated zeroed and lazily by the operating system: a page costs memory only
once a sequence reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos import plan_pb2
from runner_svc.backend import StepBatch, StepOutput
from runner_svc.plan_check import Limits, PlanCheck, SlotCounters, unusable
from runner_svc.plan_columns import SAMPLE_FLAG, PlanColumns
from runner_svc.slot_state import ROW_PARAMS, SlotState, row_params


@dataclass(slots=True, eq=False)
class AppliedPlan:
    """What is left of a plan for the backend once the roster is up to date."""

    copy_sources: NDArray[np.int32]
    copy_targets: NDArray[np.int32]
    num_rows: int  # extents of the plan
    rows: NDArray[np.intp]  # plan rows in the batch: those of sequences that did not fail before
    batch: StepBatch | None  # None when no row is left


class BatchState:
    """Slots, block tables and token buffer of one runner; slots are numbered as in plans."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._counters = SlotCounters.empty(limits.num_slots)
        self._states: NDArray[np.object_] = np.full(limits.num_slots, None)  # SlotState, or None where free
        self._params = np.zeros(limits.num_slots, ROW_PARAMS)
        # The last row belongs to the dummy slot of padding rows.
        self._tokens = np.zeros((limits.num_slots + 1, limits.context_length), np.int32)
        self._tables = np.zeros((limits.num_slots + 1, limits.max_table), np.int32)

    def reset(self) -> None:
        """Releases every slot."""
        for slot in np.flatnonzero(self._counters.resident):
            self._release(int(slot))
        self._counters = SlotCounters.empty(self._limits.num_slots)

    def apply(self, plan: plan_pb2.Plan) -> AppliedPlan:
        """Brings the roster up to date with `plan` and says what the backend has to do.

        Raises PlanFault, with nothing changed, when the plan does not fit the roster.
        """
        columns = PlanColumns.read(plan)
        counters = PlanCheck(self._limits, self._counters.copy()).run(plan, columns)
        for slot in columns.releases:
            self._release(int(slot))
        for admission in plan.admissions:
            self._admit(admission, counters)
        if len(columns.append_slots):
            self._tables[columns.append_slots, columns.append_indexes] = columns.append_blocks
        self._counters = counters
        rows = np.flatnonzero(~counters.failed[columns.extent_slots])
        return AppliedPlan(
            columns.copy_sources,
            columns.copy_targets,
            len(columns.extent_slots),
            rows,
            self._batch(columns, rows) if len(rows) else None,
        )

    def record(self, batch: StepBatch, output: StepOutput) -> None:
        """Takes over what `batch`, the one applied last, came to: computed positions, sampled tokens, failures."""
        counters = self._counters
        ends = batch.ends
        counters.computed[batch.slots] = ends
        sampled = output.token_counts.astype(bool)
        slots = batch.slots[sampled]
        self._tokens[slots, ends[sampled]] = output.tokens
        counters.num_tokens[slots] += 1
        counters.failed[batch.slots[output.statuses != plan_pb2.ROW_STATUS_UNSPECIFIED]] = True

    def residents(self) -> list[plan_pb2.ResidentSequence]:
        """All that a scheduler needs to go on with the sequences, in slot order."""
        counters = self._counters
        return [
            plan_pb2.ResidentSequence(
                slot=state.slot,
                sequence_id=state.sequence_id,
                tokens=state.tokens[: counters.num_tokens[state.slot]].tobytes(),
                prompt_len=state.prompt_len,
                computed=int(counters.computed[state.slot]),
                blocks=self._tables[state.slot, : counters.num_blocks[state.slot]].tobytes(),
                context=state.context,
            )
            for state in self._states
            if state is not None
        ]

    def _release(self, slot: int) -> None:
        self._states[slot] = None
        self._tables[slot, : self._counters.num_blocks[slot]] = 0

    def _admit(self, admission: plan_pb2.Admission, counters: SlotCounters) -> None:
        slot = admission.slot
        tokens = np.frombuffer(admission.tokens, "<i4")
        blocks = np.frombuffer(admission.blocks, "<i4")
        self._tokens[slot, : len(tokens)] = tokens
        self._tables[slot, : len(blocks)] = blocks
        self._states[slot] = SlotState.admitted(admission, self._tokens[slot])
        self._params[slot] = row_params(admission)
        counters.failed[slot] = unusable(admission, self._limits.vocab_size)

    def _batch(self, columns: PlanColumns, rows: NDArray[np.intp]) -> StepBatch:
        slots, starts = columns.extent_slots[rows], columns.extent_starts[rows]
        counts = columns.extent_counts[rows]
        block_size = self._limits.block_size
        if len(rows) == counts.sum():
            row_slots, positions = slots, starts
        else:
            row_slots = np.repeat(slots, counts)
            firsts = np.cumsum(counts, dtype=np.int32) - counts
            positions = np.arange(len(row_slots), dtype=np.int32) + np.repeat(starts - firsts, counts)
        width = -(-int((starts + counts).max()) // block_size)
        indexes, offsets = np.divmod(positions, block_size)
        return StepBatch(
            slots=slots,
            starts=starts,
            counts=counts,
            sample=(columns.extent_flags[rows] & SAMPLE_FLAG).astype(bool),
            tokens=self._tokens[row_slots, positions],
            positions=positions,
            slot_mapping=self._tables[row_slots, indexes].astype(np.int64) * block_size + offsets,
            block_tables=self._tables[slots, :width],
            params=self._params[slots],
            states=self._states[slots].tolist(),
        )
