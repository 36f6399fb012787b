"""The positions of a batch whose next tokens are drawn: one of most sampling rows, several of a row that drafted.

A sampler draws one token for each row of a batch. `each_position` makes every sampled position a row of its own, so
that it is drawn as it would be in a step of its own: with its own noise, and after adjustments that count the tokens
before it, drafts included.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.interface.step import StepBatch, run_positions


def logit_indexes(batch: StepBatch, rows: NDArray[np.intp], verified: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the indexes, among the batch's T positions, of those that the `rows` [L] sample after, int64 [P].

    `verified` [L]: number of drafted tokens of each row; it samples after its last 1 + this many positions.
    """
    ends = np.cumsum(batch.counts, dtype=np.int64)[rows]
    return run_positions(ends - verified - 1, 1 + verified)


def each_position(
    batch: StepBatch, rows: NDArray[np.intp], verified: NDArray[np.int32], tokens: NDArray[np.int32]
) -> StepBatch:
    """Returns a batch of P rows: one for each position that the `rows` [L] of `batch` sample after, in order.

    Arguments as of `logit_indexes`; `tokens` is the token buffer [slots + 1, context_length] with the drafts in it.
    """
    batch_rows = np.repeat(rows, 1 + verified)
    drafting = set(rows[verified > 0].tolist())
    states = {
        row: replace(batch.states[row], tokens=tokens[batch.slots[row]]) if row in drafting else batch.states[row]
        for row in rows.tolist()
    }
    return replace(
        batch,
        slots=batch.slots[batch_rows],
        starts=run_positions(batch.ends[rows] - verified - 1, 1 + verified),
        counts=np.ones(len(batch_rows), np.int32),
        sample=np.ones(len(batch_rows), np.bool_),
        params=batch.params[batch_rows],
        states=[states[row] for row in batch_rows.tolist()],
        awaits=np.zeros(0, np.intp),
        drafts=np.zeros(0, np.int32),
    )


def row_logprobs(
    rows: NDArray[np.intp], firsts: NDArray[np.int64], kept: NDArray[np.integer], entries: list[plan_pb2.RowLogprobs]
) -> list[plan_pb2.RowLogprobs]:
    """Returns the log-probabilities of the tokens that each of the `rows` [L] keeps, an entry for each row.

    `entries` are those of the positions, whose `row` counts positions; row i's begin at `firsts[i]` and it keeps the
    first `kept[i]`.
    """
    by_position = {entry.row: entry for entry in entries}
    joined = []
    for row, first, count in zip(rows.tolist(), firsts.tolist(), kept.tolist(), strict=True):
        own = [by_position[position] for position in range(first, first + count) if position in by_position]
        if own:
            joined.append(_joined(row, own))
    return joined


def _joined(row: int, entries: list[plan_pb2.RowLogprobs]) -> plan_pb2.RowLogprobs:
    return plan_pb2.RowLogprobs(
        row=row,
        values=b"".join(entry.values for entry in entries),
        top=entries[0].top,
        top_ids=b"".join(entry.top_ids for entry in entries),
        top_values=b"".join(entry.top_values for entry in entries),
    )
