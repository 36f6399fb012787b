"""Every request from Submit to its end: where its sequences wait, what its tenant has, what its worker is owed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from roster_protos import engine_pb2
from scheduler_svc.metrics.measurements import Measurements
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import NOBODY, End, FinishReason, Phase, Request, Sequence
from scheduler_svc.plan.applied_result import end_of
from scheduler_svc.policy import PolicyGuard
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue, queue_for
from scheduler_svc.queue.tenant_shares import TenantShares
from scheduler_svc.requests.outbox import Outbox
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.requests.service_rate import ServiceRate
from scheduler_svc.requests.totals import Totals
from scheduler_svc.scheduler.policy_views import request_view
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


class WaitingPlace(Protocol):
    """A place beside the shared queue where sequences wait: the runners' own queues, a quarantine."""

    @property
    def num_waiting(self) -> int:
        """Its sequences."""

    def discard(self, sequence: Sequence) -> None:
        """Takes the sequence out, if it is there."""


class Requests:
    """Owns the requests of one engine. Not thread-safe: it belongs to the engine's thread."""

    def __init__(
        self, settings: SchedulerSettings, policy: PolicyGuard, ledger: Ledger, wall_clock: Callable[[], float]
    ) -> None:
        """`wall_clock`: seconds since 1970."""
        self.policy = policy
        self.ledger = ledger
        self.queue: Queue = queue_for(policy, ledger)
        """The shared queue at the moment: a policy swap makes a new one."""
        self.places: list[WaitingPlace] = []
        """Where sequences wait beside it."""
        self.shares = TenantShares(settings.tenant_limits, settings.max_waiting_requests, settings.max_waiting_tokens)
        self.rate = ServiceRate()
        self.book = RequestBook(settings.retention_s, settings.retention_requests)
        self.outbox = Outbox()
        self.totals = Totals()
        self.measurements = Measurements()
        self.when_ended: list[Callable[[Sequence], None]] = []
        """Called with each sequence that has just ended, before its request is forgotten."""
        self._wall_clock = wall_clock
        self._serial = 0

    def submit(self, request: Request) -> None:
        """The request counts from now on; `begin` queues its sequences."""
        request.arrival_unix_s = self._wall_clock()
        request.accepted = False
        self.enter(request)
        self.shares.submitted(request)

    def enter(self, request: Request) -> None:
        """The request is known, and its sequences have their ranks."""
        self.book.add(request)
        key = self.policy.key(request_view(request), self.ledger)
        for sequence in request.sequences:
            self._serial += 1
            sequence.rank = Rank.of(key, self._serial)

    def begin(self, request: Request) -> None:
        """Its sequences may run: queues those that live, or ends them if the received tokens already did."""
        if not request.accepted:
            self._accept(request)
        self.queue.arrive(request.tenant)
        for sequence in request.sequences:
            if sequence.phase is Phase.FINISHED:
                continue
            end = end_of(sequence, sequence.tokens[-1]) if request.num_received else None
            if end is not None:
                self.finish(sequence, end)
            else:
                self.shares.enter(sequence, self.queue)

    def _accept(self, request: Request) -> None:
        """Tells the worker the ids of the request's sequences."""
        self.note_accepted(request)
        accepted = engine_pb2.Accepted(
            handle=request.handle, first_sequence_id=request.sequences[0].id, seed=request.seed
        )
        self.outbox.message(request.owner, engine_pb2.FromEngine(accepted=accepted))

    def note_accepted(self, request: Request) -> None:
        """Its worker knows its sequences, or hears of them now."""
        if not request.accepted:
            request.accepted = True
            self.totals.requests += 1

    def rank_anew(self, sequence: Sequence) -> None:
        """The key is that of the policy in force; the serial number, which settles ties, stays."""
        sequence.rank = sequence.rank.with_key(self.policy.key(request_view(sequence.request), self.ledger))
        if sequence.scheduler is not None:
            sequence.scheduler.forget_lowest_rank()

    def started(self, sequence: Sequence) -> None:
        """The sequence has got a slot."""
        self.shares.started(sequence)
        self.rate.seated(len(sequence.log))

    # ------------------------------------------------------------------ ends

    def finish(self, sequence: Sequence, end: End) -> None:
        """Ends the sequence wherever it is. A second end is ignored."""
        if sequence.phase is Phase.FINISHED:
            return
        if not sequence.request.accepted and sequence.request.owner != NOBODY:
            self._accept(sequence.request)  # it ends before its grammar is compiled
        if sequence.request.accepted:
            self.rate.ended(
                in_slot=sequence.scheduler is not None,
                early=end.reason is not FinishReason.LENGTH,
                age_s=self.ledger.now_s - sequence.request.arrival_s,
            )
        if sequence.scheduler is not None:
            failed = end.reason is FinishReason.ERROR
            sequence.scheduler.leave(sequence, end.reason.name.lower(), failed=failed)
        else:
            self.discard_waiting(sequence)
        sequence.phase = Phase.FINISHED
        sequence.end = end
        for note_end in self.when_ended:
            note_end(sequence)
        self.shares.ended(sequence, self.queue)
        if sequence.request.accepted:
            self.totals.finished += 1
            self.measurements.ended(sequence, end.reason, self.ledger.now_s)
        self.outbox.end(sequence)
        if sequence.request.finished:
            self.book.retire(sequence.request, self.ledger.now_s)

    def discard_waiting(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out of whichever queue it is in."""
        self.queue.discard(sequence)
        for place in self.places:
            place.discard(sequence)

    def finish_all(self, end: End) -> None:
        """Ends everything that lives."""
        for request in self.book.live():
            self.finish_request(request, end)

    def finish_request(self, request: Request, end: End) -> None:
        """Ends every choice of the request that has not ended."""
        for sequence in request.sequences:
            self.finish(sequence, end)

    # ------------------------------------------------------------------ what there is

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot: queued, placed on a runner, or held as suspects."""
        return len(self.queue) + sum(place.num_waiting for place in self.places)

    @property
    def idle(self) -> bool:
        """No request lives."""
        return not self.book.num_live
