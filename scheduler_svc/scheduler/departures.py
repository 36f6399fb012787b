"""How sequences leave their slots: for good, back to the queue, or for another runner."""

from __future__ import annotations

from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.arrivals import RunnerMoves
from scheduler_svc.scheduler.prefix_cache import PrefixCache
from scheduler_svc.scheduler.retention import Retention

PREEMPTED = "preempted"
"""Why a sequence leaves that will be admitted again."""


class Departures:
    """Takes sequences out of the slots of one runner."""

    def __init__(
        self, table: SlotTable, prefix: PrefixCache, plans: PlanBuilder, retention: Retention, moves: RunnerMoves
    ) -> None:
        self._table = table
        self._prefix = prefix
        self._plans = plans
        self._retention = retention
        self._moves = moves
        self.preemptions = 0
        """Sequences preempted so far."""

    def leave(self, sequence: Sequence, reason: str, *, failed: bool = False) -> None:
        """Removes the sequence from its slot and releases its blocks. Its rows in flight will be dropped."""
        slot = sequence.slot
        self._table.settle(slot)
        if failed:
            self._prefix.forget(sequence)
        else:
            self._prefix.keep(sequence, self._table)
            self._retention.left(sequence, int(self._table.computed[slot]), ended=reason != PREEMPTED)
        self._prefix.release_blocks(sequence, self._plans.last_number)
        sequence.blocks = []
        self._table.vacate(slot)
        self._plans.release_slot(slot)
        self._plans.note_leave(sequence, slot, reason)
        sequence.scheduler = None

    def preempt(self, sequence: Sequence, queue: Queue) -> None:
        """Returns the sequence to the queue, to be recomputed. Its rows in flight still deliver their tokens."""
        self._count_stale(sequence)
        self.leave(sequence, PREEMPTED)
        sequence.preemptions += 1
        self.preemptions += 1
        queue.push(sequence)

    def detach(self, sequence: Sequence, key: bytes) -> int:
        """Takes the sequence out of its slot, to run elsewhere; its blocks stay, held under `key`.

        Its rows in flight still deliver their tokens. Returns the positions that are computed once they have, at most.
        """
        planned = int(self._table.planned[sequence.slot])
        self._count_stale(sequence)
        self._prefix.forget_pending(sequence)  # being held, they would keep a name that no sequence computes
        self._moves.hold(key, list(sequence.blocks))
        self.leave(sequence, "moved")
        sequence.phase = Phase.WAITING
        return planned

    def _count_stale(self, sequence: Sequence) -> None:
        """Notes the rows in flight of a sequence that is about to leave its slot."""
        epoch = self._table.epoch[sequence.slot]
        sequence.stale = sum(int(epoch in flight.epochs) for flight in self._plans.in_flight)

    def requeue_all(self, queue: Queue) -> int:
        """Returns all sequences to the queue after the loss of the runner; its plans in flight are discarded. Returns
        the number of sequences."""
        in_flight = self._plans.in_flight
        for flight in in_flight:
            for sequence in flight.sequences:
                sequence.stale = 0
        in_flight.clear()
        running = self._table.running()
        for sequence in running:
            self.leave(sequence, PREEMPTED)
            queue.push(sequence)
        self._prefix.clear()
        return len(running)
