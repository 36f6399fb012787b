"""Rows with forced tokens: the tokens that a sequence's grammar forces are computed together, in one step.

Where the mask of a position allows one token, no draw is needed. A plan appends such tokens to their sequence, the
runner computes them like a part of a prompt, and only the position after them is sampled. A run is cut to the step and
to free blocks, and what is left comes with later rows, one by one at worst. So it does while it would not pay: a step
with a few forced tokens takes all of its rows longer than one that only decodes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.plan_draft import PlanDraft
from scheduler_svc.plan.slot_table import IntColumn, SlotTable

MOST_FORCED = 255
"""Maximum number of forced tokens of a row: their number is a byte."""


class StepSeconds(Protocol):
    """The part of `StepTimeModel` that is used here."""

    @property
    def known(self) -> bool: ...

    def seconds(self, prefill_tokens: float, decode_rows: int, context: int, start: int = 0) -> float: ...


def add_forced_rows(plans: PlanBuilder, draft: PlanDraft, max_step_tokens: int, times: StepSeconds) -> None:
    """Lets the decoding rows of the draft, which has no others, append the tokens that their grammars force.

    Each of them must have a block for its own position. `max_step_tokens`: positions of a step.
    """
    table, taken = plans.table, []
    runs = _forced_runs(table, draft.decode, max_step_tokens)
    if not runs or not _pays(table, draft.decode, list(runs), sum(map(len, runs.values())), times):
        return
    for index, tokens in runs.items():
        slot = int(draft.decode[index])
        count = _with_blocks(plans, draft, slot, len(tokens))
        if count > 0:
            draft.add_forced(slot, int(table.planned[slot]), tokens[:count])
            taken.append(index)
    draft.decode = np.delete(draft.decode, taken)


def _forced_runs(table: SlotTable, decode: IntColumn, max_step_tokens: int) -> dict[int, list[int]]:
    """Returns the forced tokens of the decoding slots that have some, by index, within the step and their limits."""
    runs, room = {}, max_step_tokens - len(decode)
    for index in np.flatnonzero(table.constrained[decode]).tolist():
        slot = int(decode[index])
        known = int(table.known[slot])
        # The position after them is sampled, so they are one token less than there is room for.
        most = min(room, int(table.limit[slot]) - known - 1, MOST_FORCED)
        tokens = table.at(slot).forced_from(known)[: max(0, most)]
        if tokens:
            runs[index] = tokens
            room -= len(tokens)
    return runs


def may_pay(table: SlotTable, slots: list[int], run: float, times: StepSeconds) -> bool:
    """Returns whether a plan would take runs of `run` forced tokens at all of these slots, one or more."""
    decode = (table.lag == 1).nonzero()[0]
    return _pays(table, decode, np.isin(decode, slots).nonzero()[0].tolist(), run * len(slots), times)


def _pays(table: SlotTable, decode: IntColumn, runs: list[int], extra: float, times: StepSeconds) -> bool:
    """Returns whether a step with runs at these indexes of `decode`, of `extra` tokens in all, makes more tokens a
    second than one without; so it does beside a prompt."""
    if not runs or not times.known or (table.lag > 1).any():
        return True
    rows, positions = len(decode), table.planned[decode]
    context, own = int(positions.sum()), int(positions[runs].sum())
    plain_s = times.seconds(0, rows, context)
    with_runs_s = times.seconds(len(runs) + extra, rows - len(runs), context - own, own // len(runs))
    return with_runs_s * rows <= plain_s * (rows + extra)


def _with_blocks(plans: PlanBuilder, draft: PlanDraft, slot: int, count: int) -> int:
    """Returns how many of `count` forced tokens have a position in the slot's blocks, after its table has grown by as
    many free blocks as they need."""
    table, pool = plans.table, plans.pool
    room = int(table.capacity[slot] - table.planned[slot]) - 1
    missing = min(-(-(count - room) // pool.block_size), pool.num_free)
    if missing > 0:
        draft.appends.extend(plans.grow(np.array([slot]), np.array([missing], np.int32)))
        room += missing * pool.block_size
    return min(count, room)
