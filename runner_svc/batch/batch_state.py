"""The runner's slots: the sequence in each slot, the block tables, and the token buffer that decode steps read.

A plan is checked as a whole before anything changes (`PlanCheck` works on copies of the small counters). Then releases,
admissions and table appends are applied, in this order. Copies and extents are passed to the backend as arrays. Work
per row is numpy; Python loops run only over admissions and over rows' `SlotState` references.

Plans are applied in order, and a plan may be applied before the previous one is recorded. Once a plan is applied, its
computed positions and sampled tokens count as known. Tokens of rows that wait for masks are the exception: no plan may
read them before they are recorded. When a plan is recorded, a row's epoch shows whether its slot has another sequence
by then; if so, the row's record is dropped. A token of a sequence that failed in an earlier plan is dropped too.

How many tokens a row with drafts samples is known only when it is recorded: 1 to 1 + drafts. Until then the slot has a
lower and an upper bound of its number of tokens, and only the backend's counter says where its next row starts.

A row that waits for a mask is drawn after its plan. Plans sent before its mask may have been launched by then and may
have given its slot to another sequence. `outlived` finds these rows by the same epochs, right before the draw is
launched. The thread that applies plans does both, and a device computes in launch order, so the result of `outlived` is
still valid when the token is written. Every token that a step reads from a device's token buffer was therefore written
once in its epoch: by the admission, or by the one row that samples that position. (`PlanCheck` refuses a second such
row, and a row that reads a token still waiting for its mask.) KV is computed only from such tokens, so that no block,
shared or not, contains KV of a token that was later replaced.

The operating system allocates the token buffer and the block tables zeroed and lazily: a page uses memory only once a
sequence reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import AWAIT_FLAG, SAMPLE_FLAG
from roster_protos import plan_pb2
from runner_svc.batch.batch_inputs import gather_inputs
from runner_svc.batch.drafted_continuation import DraftedContinuation
from runner_svc.batch.host_tickets import HostTickets
from runner_svc.batch.plan_check import Limits, PlanCheck, SlotCounters
from runner_svc.batch.plan_columns import PlanColumns
from runner_svc.batch.plan_continuation import Appends, PlanContinuation
from runner_svc.batch.plan_copies import PlanCopies
from runner_svc.interface.backend import AdmittedSlot, ForcedTokens, SlotChanges
from runner_svc.interface.slot_state import ROW_PARAMS, SlotState, row_params
from runner_svc.interface.step import StepBatch, StepOutput, run_positions

_NONE = np.zeros(0, np.int32)
_NO_APPENDS = Appends(_NONE, _NONE, _NONE)


@dataclass(slots=True, eq=False)
class AppliedPlan:
    """The part of a plan that is left for the backend once the slots are up to date."""

    changes: SlotChanges
    copy_sources: NDArray[np.int32]
    copy_targets: NDArray[np.int32]
    num_rows: int  # number of extents in the plan
    rows: NDArray[np.intp]  # plan rows in the batch: those whose sequence has not failed
    batch: StepBatch | None  # None if no row is left
    drafts: bool  # whether the plan has a column of drafts
    epochs: NDArray[np.int64]  # [rows] epoch of each row's slot, which identifies its sequence
    copies: PlanCopies | None = None  # between the cache and the host pool


class BatchState:
    """Slots, block tables and token buffer of one runner; slots are numbered as in plans.

    With `gathers_inputs`, the backend keeps tokens and tables itself, and batches have no inputs.
    """

    def __init__(self, limits: Limits, gathers_inputs: bool = False, tickets: HostTickets | None = None) -> None:
        self._limits = limits
        self.tickets = tickets or HostTickets(limits.num_blocks, 0, limits.block_size)
        """What is being copied to and from the host pool; None gives no host pool."""
        self._gathers_inputs = gathers_inputs
        self._counters = SlotCounters.empty(limits.num_slots)
        self._states: NDArray[np.object_] = np.full(limits.num_slots, None)  # SlotState, or None if free
        self._params = np.zeros(limits.num_slots, ROW_PARAMS)
        self._epochs = np.zeros(limits.num_slots, np.int64)  # number of sequences admitted to each slot
        self._all_rows = np.arange(limits.num_slots)
        # Set if the next plan may skip most of the check.
        self._continuation: PlanContinuation | DraftedContinuation | None = None
        # The last row belongs to the dummy slot of padding rows.
        self._tokens = np.zeros((limits.num_slots + 1, limits.context_length), np.int32)
        self._tables = np.zeros((limits.num_slots + 1, limits.max_table), np.int32)

    def reset(self) -> None:
        """Releases every slot."""
        for slot in np.flatnonzero(self._counters.resident):
            self._release_slot(int(slot))
        self._counters = SlotCounters.empty(self._limits.num_slots)
        self._continuation = None

    def apply(self, plan: plan_pb2.Plan) -> AppliedPlan:
        """Applies `plan` to the slots and returns the work for the backend.

        Raises PlanFault, with nothing changed, if the plan does not fit the slots.
        """
        followed = self._continue(plan)
        if followed is not None:
            return followed
        self._continuation = None
        columns, copies = PlanColumns.read(plan), PlanCopies.read(plan)
        counters = PlanCheck(self._limits, self._counters.copy()).run(plan, columns)
        self.tickets.check(plan, columns, copies)
        if copies is not None:
            self.tickets.begin(copies)
        for slot in columns.releases:
            self._release_slot(int(slot))
        admitted = [self._admit_sequence(admission) for admission in plan.admissions]
        usable = [entry for entry in admitted if not counters.failed[entry.state.slot]]
        if len(columns.append_slots):
            self._tables[columns.append_slots, columns.append_indexes] = columns.append_blocks
        self._counters = counters
        forced = self._append_forced(columns) if len(columns.extent_forced) else ()
        rows = np.flatnonzero(~counters.failed[columns.extent_slots])
        batch = self._batch(columns, rows) if len(rows) else None
        if batch is not None:
            counters.computed[batch.slots] = batch.upper_ends
            counters.num_tokens[batch.slots[batch.drawing_rows]] += 1
            if len(batch.drafts):
                counters.spread[batch.slots] += batch.drafts
        epochs = self._epochs[columns.extent_slots[rows]]
        if batch is not None and self._gathers_inputs:
            self._continuation = PlanContinuation.after(plan, batch, epochs, counters, self._limits)
            if self._continuation is None:
                self._continuation = DraftedContinuation.after(plan, batch, epochs)
        return AppliedPlan(
            SlotChanges(usable, columns.append_slots, columns.append_indexes, columns.append_blocks, forced),
            columns.copy_sources,
            columns.copy_targets,
            len(columns.extent_slots),
            rows,
            batch,
            len(columns.extent_drafts) > 0,
            epochs,
            copies,
        )

    def _append_forced(self, columns: PlanColumns) -> list[ForcedTokens]:
        """Appends the plan's forced tokens to the sequences that have not failed, whose counters include them."""
        counters, forced, end = self._counters, [], 0
        for slot, count in zip(columns.extent_slots.tolist(), columns.extent_forced.tolist(), strict=True):
            begin, end = end, end + count
            if count and not counters.failed[slot]:
                first = int(counters.num_tokens[slot]) - count
                self._tokens[slot, first : first + count] = columns.forced_tokens[begin:end]
                forced.append(ForcedTokens(slot, first, columns.forced_tokens[begin:end]))
        return forced

    def _continue(self, plan: plan_pb2.Plan) -> AppliedPlan | None:
        """Applies a plan that continues the last one; returns None for any other plan."""
        continuation = self._continuation
        if continuation is None or not continuation.follows(plan):
            return None
        appends = Appends.read(plan) if plan.append_slots or plan.append_indexes or plan.append_blocks else _NO_APPENDS
        if appends is None or self.tickets.hold(appends.blocks):
            return None
        if not continuation.advance(plan, appends, self._counters, self._limits):
            return None
        if len(appends.slots):
            self._tables[appends.slots, appends.indexes] = appends.blocks
        batch = continuation.batch
        return AppliedPlan(
            SlotChanges([], appends.slots, appends.indexes, appends.blocks),
            _NONE,
            _NONE,
            len(batch.slots),
            self._all_rows[: len(batch.slots)],
            batch,
            continuation.drafts,
            continuation.epochs,
        )

    def record(self, applied: AppliedPlan, output: StepOutput, rows: NDArray[np.bool_] | None = None) -> None:
        """Records the tokens and failures of the batch of `applied`. Plans are recorded in order.

        `rows` [R] selects the rows to record; None means all. Each row is recorded once. A row whose sequence failed in
        an earlier plan, recorded after this one was applied, is set to ROW_STATUS_FAILED in `output`.
        """
        batch, counters = applied.batch, self._counters
        if batch is None:
            return
        if self._continuation is not None and applied.epochs is self._continuation.epochs and output.drew_all:
            self._tokens[batch.slots, batch.ends] = output.tokens
            if self._limits.max_drafts:  # a row is passed again, in vain, if other plans waited for masks
                counters.recorded[batch.slots] = np.maximum(counters.recorded[batch.slots], batch.ends + 1)
            return
        current = (self._epochs[batch.slots] == applied.epochs) & counters.resident[batch.slots]
        if rows is not None:
            current &= rows
        late = current & counters.failed[batch.slots]
        if late.any():
            output.fail(late)
        drew = output.token_counts.astype(bool)
        writes = current & drew
        if self._limits.max_drafts:
            self._append(batch, output, writes)
            self._correct_bounds(batch, output, current)
        else:
            self._tokens[batch.slots[writes], batch.ends[writes]] = output.tokens[writes[drew]]
        lost = current & batch.sample & ~drew
        if len(batch.awaits):
            waiting = batch.waiting
            counters.num_tokens[batch.slots[writes & waiting]] += 1
            lost &= ~waiting
        if lost.any():
            slots = batch.slots[lost]
            counters.num_tokens[slots] -= 1
            counters.computed[slots] = counters.num_tokens[slots]  # what its rows in flight would compute is no token
        failed = current & (output.statuses != plan_pb2.ROW_STATUS_UNSPECIFIED)
        if failed.any():
            counters.failed[batch.slots[failed]] = True
            self._continuation = None

    def _append(self, batch: StepBatch, output: StepOutput, writes: NDArray[np.bool_]) -> None:
        """Appends the tokens of the rows set in `writes` [R] to the recorded ones."""
        slots, counts = batch.slots[writes], output.token_counts[writes].astype(np.int32)
        firsts = self._counters.recorded[slots]
        tokens = output.tokens[np.repeat(writes, output.token_counts)]
        self._tokens[np.repeat(slots, counts), run_positions(firsts, counts)] = tokens
        self._counters.recorded[slots] = firsts + counts

    def _correct_bounds(self, batch: StepBatch, output: StepOutput, current: NDArray[np.bool_]) -> None:
        """Corrects the bounds of the rows without start that are set in `current` [R] by their number of tokens.

        A row without a token loses only its drafts here: `record` does the rest for all such rows.
        """
        rows = np.flatnonzero(current & (batch.starts < 0))
        if not len(rows):
            return
        slots, counters = batch.slots[rows], self._counters
        counts = output.token_counts[rows].astype(np.int32)
        drafts = batch.drafts[rows] if len(batch.drafts) else 0
        counters.num_tokens[slots] += np.maximum(counts - 1, 0)
        counters.spread[slots] -= drafts
        counters.computed[slots] -= 1 + drafts - counts

    def outlived(self, applied: AppliedPlan, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Returns bool [W]: which of the batch's `rows` [W] no longer have a sequence to write their token for.

        The sequence has left its slot, which may have another one by now, or has failed.
        """
        if applied.batch is None:
            return np.zeros(0, np.bool_)
        slots, counters = applied.batch.slots[rows], self._counters
        there = (self._epochs[slots] == applied.epochs[rows]) & counters.resident[slots] & ~counters.failed[slots]
        return ~there

    def residents(self) -> list[plan_pb2.ResidentSequence]:
        """Returns the state that a scheduler needs to continue the sequences, in slot order."""
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

    def _release_slot(self, slot: int) -> None:
        self._states[slot] = None
        self._tables[slot, : self._counters.num_blocks[slot]] = 0

    def _admit_sequence(self, admission: plan_pb2.Admission) -> AdmittedSlot:
        slot = admission.slot
        tokens = np.frombuffer(admission.tokens, "<i4")
        blocks = np.frombuffer(admission.blocks, "<i4")
        self._tokens[slot, : len(tokens)] = tokens
        self._tables[slot, : len(blocks)] = blocks
        state = self._states[slot] = SlotState.admitted(admission, self._tokens[slot])
        self._params[slot] = row_params(admission)
        self._epochs[slot] += 1
        return AdmittedSlot(state, self._params[slot], len(tokens), blocks, admission.num_computed)

    def _batch(self, columns: PlanColumns, rows: NDArray[np.intp]) -> StepBatch:
        slots, starts = columns.extent_slots[rows], columns.extent_starts[rows]
        counts = columns.extent_counts[rows]
        flags = columns.extent_flags[rows]
        drafts = columns.extent_drafts[rows].astype(np.int32) if len(columns.extent_drafts) else _NONE
        sample, awaits = (flags & SAMPLE_FLAG).astype(bool), np.flatnonzero(flags & AWAIT_FLAG)
        batch = StepBatch(
            slots=slots,
            starts=starts,
            counts=counts,
            sample=sample,
            tokens=_NONE,
            positions=_NONE,
            slot_mapping=_NONE.astype(np.int64),
            block_tables=_NONE.reshape(0, 0),
            params=self._params[slots],
            states=self._states[slots].tolist(),
            awaits=awaits,
            drafts=drafts,
        )
        if self._gathers_inputs:
            if self._limits.max_drafts and starts.min() < 0:
                least, most = self._counters.num_tokens[slots], self._counters.most_tokens(slots)
                batch.lowest = np.where(starts < 0, least - 1, starts)
                batch.highest = np.where(starts < 0, most - 1, starts)
            return batch
        return gather_inputs(batch, self._tokens, self._tables, self._limits.block_size)
