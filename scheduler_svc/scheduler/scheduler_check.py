"""Checks the invariants of a scheduler and its block pool, when idle and, in tests, after every step."""

from __future__ import annotations

from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Raises RuntimeError for the first violated invariant. Takes O(slots + blocks)."""
    table = scheduler.table
    running = table.running()
    tables = [*(sequence.blocks for sequence in running), *scheduler.moves.held.values()]
    if scheduler.tiers is not None:
        tables += scheduler.tiers.held()
        scheduler.tiers.check()
    scheduler.pool.check(tables)
    scheduler.prefix.check(running)
    if not {arrival.key for arrival in scheduler.moves.arrivals} <= scheduler.moves.held.keys():
        raise RuntimeError("the blocks of a sequence that has arrived from another runner are not held")
    for sequence in running:
        _check_sequence(scheduler, sequence)
    if len({sequence.rank for sequence in running}) < len(running):
        raise RuntimeError("two sequences have the same rank: neither could be preempted for the other")
    if len(running) + len(set(table.free)) != table.num_slots:
        raise RuntimeError("a slot is neither free nor in use, or is free twice")


def _check_sequence(scheduler: Scheduler, sequence: Sequence) -> None:
    table, slot = scheduler.table, sequence.slot
    if table.sequences[slot] is not sequence or sequence.phase is not Phase.RUNNING:
        raise RuntimeError(f"sequence {sequence.id} is not the running sequence of its slot")
    length, planned, known = int(table.length[slot]), int(table.planned[slot]), int(table.known[slot])
    capacity = int(table.capacity[slot])
    if length != len(sequence.tokens) or capacity != len(sequence.blocks) * scheduler.pool.block_size:
        raise RuntimeError(f"sequence {sequence.id}: its length or capacity differs from the slot table's")
    spread = int(table.spread[slot])
    if not (int(table.computed[slot]) <= planned - spread and planned <= capacity):
        raise RuntimeError(f"sequence {sequence.id}: computed, planned and capacity are out of order")
    if sequence.limit > scheduler.most_tokens:
        raise RuntimeError(f"sequence {sequence.id} may have {sequence.limit} tokens, which this runner cannot hold")
    if not planned < known <= int(table.limit[slot]):
        raise RuntimeError(f"sequence {sequence.id}: lag or limit is wrong")
    epoch = table.epoch[slot]
    samples = sum(int(flight.sample[flight.epochs == epoch].sum()) for flight in scheduler.in_flight)
    samples += sum(int(flight.forced_counts[flight.epochs == epoch].sum()) for flight in scheduler.in_flight)
    if length + samples != known - spread:
        raise RuntimeError(
            f"sequence {sequence.id}: {length} tokens and {samples} in flight are not {known} - {spread} tokens"
        )
    drafts = sum(
        int(flight.drafts[flight.epochs == epoch].sum()) for flight in scheduler.in_flight if flight.drafts is not None
    )
    if spread != drafts:
        raise RuntimeError(
            f"sequence {sequence.id}: its counters spread by {spread}, its drafts in flight are {drafts}"
        )
