"""Requests from Submit to their end: where sequences wait, tenant shares, messages to front workers."""

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
    """A place other than the shared queue where sequences wait: the runners' own queues, the quarantine."""

    @property
    def num_waiting(self) -> int:
        """Number of sequences waiting here."""

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence, if it is here."""


class Requests:
    """Owns the requests of one engine. Not thread-safe: used only by the engine's thread."""

    def __init__(
        self, settings: SchedulerSettings, policy: PolicyGuard, ledger: Ledger, wall_clock: Callable[[], float]
    ) -> None:
        """`wall_clock`: seconds since 1970."""
        self.policy = policy
        self.ledger = ledger
        self.queue: Queue = queue_for(policy, ledger)
        """The current shared queue: a policy swap replaces it."""
        self.places: list[WaitingPlace] = []
        """Places other than the shared queue where sequences wait."""
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
        ledger.count_waiting = lambda: self.queue.num_tokens

    def submit(self, request: Request) -> None:
        """Records the request; `begin` queues its sequences."""
        request.arrival_unix_s = self._wall_clock()
        request.accepted = False
        self.enter(request)
        self.shares.submitted(request)

    def enter(self, request: Request) -> None:
        """Adds the request to the book and ranks its sequences."""
        self.book.add(request)
        if request.conversation_id:
            key = request.tenant, request.conversation_id
            self.ledger.awaited.setdefault(key, []).append(request.arrival_s)
        key = self.policy.key(request_view(request), self.ledger)
        for sequence in request.sequences:
            self._serial += 1
            sequence.rank = Rank.of(key, self._serial)

    def begin(self, request: Request) -> None:
        """Queues the request's live sequences, or ends those whose received tokens already end them."""
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
        """Sends the worker the ids of the request's sequences."""
        self.note_accepted(request)
        accepted = engine_pb2.Accepted(
            handle=request.handle, first_sequence_id=request.sequences[0].id, seed=request.seed
        )
        self.outbox.message(request.owner, engine_pb2.FromEngine(accepted=accepted))

    def note_accepted(self, request: Request) -> None:
        """Counts the request as accepted: its worker knows its sequences, or receives them now."""
        if not request.accepted:
            request.accepted = True
            self.totals.requests += 1

    def rank_anew(self, sequence: Sequence) -> None:
        """Ranks the sequence with the installed policy; its serial number, the tie-breaker, stays."""
        sequence.rank = sequence.rank.with_key(self.policy.key(request_view(sequence.request), self.ledger))
        if sequence.scheduler is not None:
            sequence.scheduler.forget_lowest_rank()

    def started(self, sequence: Sequence) -> None:
        """Records that the sequence got a slot."""
        self.shares.started(sequence)
        self.rate.seated(len(sequence.log))

    # ------------------------------------------------------------------ ends

    def finish(self, sequence: Sequence, end: End) -> None:
        """Ends the sequence in any phase. A second end is ignored."""
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
        if sequence.request.conversation_id:
            self._leave_conversation(sequence.request)
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

    def _leave_conversation(self, request: Request) -> None:
        """Takes note that the request's conversation is no longer awaited, if its last sequence is about to end."""
        if sum(sequence.phase is not Phase.FINISHED for sequence in request.sequences) > 1:
            return
        key, awaited = (request.tenant, request.conversation_id), self.ledger.awaited
        if request.arrival_s in awaited.get(key, ()):
            awaited[key].remove(request.arrival_s)
            if not awaited[key]:
                del awaited[key]

    def discard_waiting(self, sequence: Sequence) -> None:
        """Removes a waiting sequence from the queue it is in."""
        self.queue.discard(sequence)
        for place in self.places:
            place.discard(sequence)

    def finish_all(self, end: End) -> None:
        """Ends all live requests."""
        for request in self.book.live():
            self.finish_request(request, end)

    def finish_request(self, request: Request, end: End) -> None:
        """Ends all choices of the request that have not ended."""
        for sequence in request.sequences:
            self.finish(sequence, end)

    # ------------------------------------------------------------------ counts

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot: queued, placed on a runner, or held as suspects."""
        return len(self.queue) + sum(place.num_waiting for place in self.places)

    @property
    def idle(self) -> bool:
        """Whether no request is live."""
        return not self.book.num_live
