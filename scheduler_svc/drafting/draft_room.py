"""The room for drafts: how many tokens a row may draft at most, and which blocks its drafts may take.

Drafts must not cost anything else. They fit into the sequence's limit and into the runner's step. They take no block
that has reusable content, none while a sequence waits, and none of the last ones, one for each running sequence: so no
sequence is preempted or refused because of drafts. A row of which only the upper bound needs a block takes a blank one
or waits for its results. What a row took and did not need stays with it.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.plan_draft import Column, PlanDraft
from scheduler_svc.plan.slot_table import IntColumn, SlotTable, run_of

_NONE, _ONE, _TWO = (np.array(number, np.int32) for number in range(3))


def lengths_within(
    plans: PlanBuilder, draft: PlanDraft, lengths: Column, max_step_tokens: int, may_grow: bool
) -> Column | None:
    """Returns how many tokens each decoding row of the draft drafts, int32 [R], at most `lengths`; None if none does.

    `lengths`: int32 [R], 0 to `most_drafts`. `max_step_tokens`: positions of a step, or those of which a runner has
    logits. If `may_grow`, block tables grow as far as there are blocks for it, and the draft gets the appends. Every
    row must have a block for its own position.
    """
    lengths = _within_step(lengths, max_step_tokens)
    lengths = _within_blocks(plans, draft, lengths, may_grow)
    return lengths if np.count_nonzero(lengths) else None


def most_drafts(table: SlotTable, decode: IntColumn, max_drafts: Column) -> Column:
    """Returns the largest number of drafts of each decoding slot, int32 [R]: with them all accepted, it reaches its
    limit at most. It is 0 if the row may not draft.

    `max_drafts`: of any row, int32 []. The slots must have room for a token, by their upper bounds.
    """
    where = run_of(decode)
    room = table.limit[where] - table.known[where]  # at least 1, and at most what the runner holds
    room -= _ONE
    np.minimum(room, max_drafts, out=room)
    room *= table.speculates[where]
    return room


def waiting_for_results(table: SlotTable, pool: BlockPool, need_block: IntColumn) -> IntColumn:
    """Returns those of the decoding slots `need_block` that wait until drafts of theirs are answered.

    Only their upper bounds need a block, perhaps not they themselves, and no blank one is left for them.
    """
    unsure = table.planned[need_block] - table.spread[need_block] < table.capacity[need_block]
    num_spare = max(0, pool.num_blank - int(np.count_nonzero(~unsure)))
    return need_block[unsure][num_spare:]


def _within_step(lengths: Column, max_step_tokens: int) -> Column:
    """Returns the numbers, those of the last rows cut so that the step has at most `max_step_tokens` positions."""
    room = max_step_tokens - len(lengths)
    if int(np.add.reduce(lengths)) <= room:
        return lengths
    before = np.cumsum(lengths, dtype=np.int32) - lengths
    return np.clip(np.int32(room) - before, 0, lengths)


def _within_blocks(plans: PlanBuilder, draft: PlanDraft, lengths: Column, may_grow: bool) -> Column:
    """Returns the numbers, cut to the positions that the rows' block tables have room for after they have grown.

    The run of a row leaves one position of its table: without it, the row behind would wait for the run's result.
    """
    table, pool, decode = plans.table, plans.pool, draft.decode
    where = run_of(decode)
    room = table.capacity[where] - table.planned[where]
    room -= _TWO
    is_short = lengths > np.maximum(room, _NONE)
    if b"\1" not in is_short.tobytes():
        return lengths
    short = is_short.nonzero()[0]
    spare = min(pool.num_blank, pool.num_free - table.num_running) if may_grow else 0
    if spare > 0:
        need = -((room[short] - lengths[short]) // pool.block_size)
        before = np.add.accumulate(need)
        if before[-1] > spare:
            num_grown = int(np.count_nonzero(before <= spare))
            short, need = short[:num_grown], need[:num_grown]
        draft.appends.extend(plans.grow(decode[short], need))
        room[short] = lengths[short]
    return np.minimum(lengths, np.maximum(room, _NONE))
