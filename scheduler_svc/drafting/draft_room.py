"""The room for drafts: how many tokens a row may draft at most, and which blocks its drafts may take.

Drafts must not cost anything else. They fit into the sequence's limit and into the runner's step. They take no block
that has reusable content, none while a sequence waits, and none of the last ones, one for each running sequence: so no
sequence is preempted or refused because of drafts. What a row took and did not need stays with it.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.plan_draft import Column, PlanDraft
from scheduler_svc.plan.slot_table import IntColumn, SlotTable


def lengths_within(
    plans: PlanBuilder, draft: PlanDraft, lengths: Column, max_drafts: int, max_step_tokens: int, may_grow: bool
) -> Column | None:
    """Returns how many tokens each decoding row of the draft drafts, int32 [R], at most `lengths`; None if none does.

    `max_drafts`: of a row; `max_step_tokens`: positions of a step, or those of which a runner has logits. If `may_grow`, block tables grow as far as there are
    blocks for it, and the draft gets the appends. Every row must have a block for its own position.
    """
    lengths = np.clip(lengths, 0, _most(plans.table, draft.decode, max_drafts))
    lengths = _within_step(lengths, max_step_tokens)
    lengths = _within_blocks(plans, draft, lengths, may_grow)
    return lengths if lengths.any() else None


def _most(table: SlotTable, decode: IntColumn, max_drafts: int) -> Column:
    """Returns the largest number of each row: it may then reach its limit, by its upper bound."""
    room = table.limit[decode] - table.known[decode] - np.int32(1)
    return np.minimum(room, np.int32(max_drafts)) * table.speculates[decode]


def _within_step(lengths: Column, max_step_tokens: int) -> Column:
    """Returns the numbers, those of the last rows cut so that the step has at most `max_step_tokens` positions."""
    room = max_step_tokens - len(lengths)
    if int(np.add.reduce(lengths)) <= room:
        return lengths
    before = np.cumsum(lengths, dtype=np.int32) - lengths
    return np.clip(np.int32(room) - before, 0, lengths)


def _within_blocks(plans: PlanBuilder, draft: PlanDraft, lengths: Column, may_grow: bool) -> Column:
    """Returns the numbers, cut to the positions that the rows' block tables have room for after they have grown."""
    table, pool, decode = plans.table, plans.pool, draft.decode
    room = table.capacity[decode] - table.planned[decode] - np.int32(1)
    short = (lengths > room).nonzero()[0]
    spare = min(pool.num_blank, pool.num_free - table.num_running) if may_grow and len(short) else 0
    if spare > 0:
        need = -((room[short] - lengths[short]) // pool.block_size)
        num_grown = int((np.cumsum(need) <= spare).sum())
        short, need = short[:num_grown], need[:num_grown]
        plans.grow_by(decode[short].tolist(), need.tolist(), draft.appends)
        room = table.capacity[decode] - table.planned[decode] - np.int32(1)
    return np.minimum(lengths, room)
