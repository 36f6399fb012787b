"""Rows with forced tokens: the tokens that a sequence's grammar forces are computed together, in one step.

Where the mask of a position allows one token, no draw is needed. A plan appends such tokens to their sequence, the
runner computes them like a part of a prompt, and only the position after them is sampled. They cost nothing else: a run
is cut to the step and to free blocks, and what is left comes with later rows, one by one at worst.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.plan_draft import PlanDraft

MOST_FORCED = 255
"""Maximum number of forced tokens of a row: their number is a byte."""


def add_forced_rows(plans: PlanBuilder, draft: PlanDraft, max_step_tokens: int) -> None:
    """Lets the decoding rows of the draft, which has no others, append the tokens that their grammars force.

    Each of them must have a block for its own position. `max_step_tokens`: positions of a step.
    """
    table, taken = plans.table, []
    room = max_step_tokens - len(draft.decode)
    for index in np.flatnonzero(table.constrained[draft.decode]).tolist():
        slot = int(draft.decode[index])
        known = int(table.known[slot])
        tokens = table.at(slot).forced_from(known)
        # The position after them is sampled, so one token less than there is room for.
        count = min(len(tokens), room, int(table.limit[slot]) - known - 1, MOST_FORCED)
        if count > 0:
            count = _with_blocks(plans, draft, slot, count)
        if count > 0:
            draft.add_forced(slot, int(table.planned[slot]), tokens[:count])
            taken.append(index)
            room -= count
    if taken:
        draft.decode = np.delete(draft.decode, taken)


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
