"""Runs many steady steps of a simulation at once; only the simulator imports it.

Consecutive plans that `PlanBuilder.follow` would make are built from shared columns, and their results are applied as
`apply_rows` would apply them. The outcome is the same, bit for bit.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.plan.steady_decode import SteadyDecode


def num_following(plans: PlanBuilder) -> int:
    """Returns how many plans may follow now, as far as free blocks suffice; 0 if a plan in flight has other rows."""
    last, steady = plans.last, plans.steady_decode()
    if last is None or steady is None:
        return 0
    num_rows = len(last.flags)
    flights = plans.in_flight
    if any(flight.batch_rows is not last.batch_rows or flight.num_decode != num_rows for flight in flights):
        return 0
    if any(flight.drafts is not None for flight in flights):
        return 0
    return min(steady.steps, plans.pool.num_free // num_rows * plans.pool.block_size)


def follow_many(plans: PlanBuilder, times_s: list[float]) -> list[InFlight]:
    """Applies `follow` at each of these times, each after the oldest plan was answered; returns the answered plans.

    At most `num_following` times. The plans are not encoded.
    """
    last, steady, count = plans.last, plans.steady_decode(), len(times_s)
    if last is None or steady is None:
        raise RuntimeError("nothing to fast-forward from")
    _grow_ahead(plans, last, count)
    flights = [*plans.in_flight, *_next_flights(steady, last, plans.table, times_s)]
    plans.in_flight.clear()
    plans.in_flight.extend(flights[count:])
    plans.last = flights[-1]
    plans.last_number = plans.last.number
    return flights[:count]


def _grow_ahead(plans: PlanBuilder, last: InFlight, count: int) -> None:
    """Allocates blocks for the `count` plans after `last`, in the order in which single steps would."""
    slots, size = last.slots, plans.pool.block_size
    lacks = (plans.table.capacity[slots] - last.ends).tolist()
    due = sorted((plan, row) for row, lack in enumerate(lacks) for plan in range(lack, count, size))
    if not due:
        return
    sequences, grown = last.sequences, [0] * len(lacks)
    for (_, row), block in zip(due, plans.pool.allocate(len(due)), strict=True):
        sequences[row].blocks.append(block)
        grown[row] += size
    plans.table.capacity[slots] += np.array(grown, np.int32)


def _next_flights(steady: SteadyDecode, last: InFlight, table: SlotTable, times_s: list[float]) -> list[InFlight]:
    """Returns `next_flight` at each of these times, at most `steps`. The block tables must have grown for all."""
    batch_rows, count = last.batch_rows, len(times_s)
    columns = list(last.ends + np.arange(count + 2, dtype=np.int32)[:, None])
    flights = [
        InFlight(
            last.number + 1 + index,
            batch_rows,
            columns[index],
            last.counts,
            columns[index + 1],
            columns[index + 2],
            last.sample,
            last.flags,
            last.num_decode,
            last.positions,
            last.samples,
            steady.steps == index + 1,
            time_s,
        )
        for index, time_s in enumerate(times_s)
    ]
    table.planned[batch_rows.slots], table.known[batch_rows.slots] = columns[count], columns[count + 1]
    steady.steps -= count
    steady.measure_room(flights[-1], table)
    return flights


def apply_all(table: SlotTable, flights: list[InFlight], tokens: Column, times_s: list[float]) -> list[AppliedResult]:
    """Applies `apply_rows` to consecutive flights with the same rows, all of which are live, sample, and do not end.

    The result of flights[i] arrives at times_s[i] with tokens[i], one per row.
    """
    batch_rows, count = flights[0].batch_rows, len(flights)
    slots = batch_rows.slots
    previous_at = np.empty((count, len(slots)))
    previous_at[0] = table.last_token_at[slots]
    previous_at[1:] = np.array(times_s[: count - 1])[:, None]
    table.computed[slots] = flights[-1].ends
    table.last_token_at[slots] = times_s[count - 1]
    table.append_all(slots, tokens, flights[-1].known)
    rows, ids = batch_rows.rows, batch_rows.sequence_ids
    return [
        AppliedResult(flight, rows, got, ids, now_s=now_s, previous_at=before_at)
        for flight, got, now_s, before_at in zip(flights, tokens, times_s, previous_at, strict=True)
    ]
