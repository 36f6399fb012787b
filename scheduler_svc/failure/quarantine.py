"""Fault attribution: finds the request that crashes runners, so that only that request is refused.

The implicated requests ("suspects" in the code) are those with rows in plans that a lost runner had not answered. The
first loss has no consequence: the request resumes. From the second on it is quarantined: it runs only in an isolation,
a group of such requests on a runner that takes no others. A request that makes progress there is released and runs as
before. If the runner is lost, the group is halved. A request that was alone on its runner is refused once that has
happened on two runners. If there is only one runner, it must have computed something else in between: other requests
if any wait, otherwise the scheduler's own probe (see `Probation`). A probe does not count there if memory ran out:
that is most likely the machine's fault, and a probe needs next to no memory.

If the lost process reconnects unharmed, or loses a probe too, its loss no longer counts against the implicated
requests; the number of such pardons is limited (see `Suspicion`). Runners that are held back are not in the pool, and
so get no isolated group.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from scheduler_svc.failure.isolation import Isolation, choose_runner, fits, has_failed_on, waiting_limit
from scheduler_svc.failure.runner_illness import RunnerIllness
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.refusal import EngineRefusal, RefusalReason
from scheduler_svc.model.sequence import End, FinishReason, Phase, Request, Sequence
from scheduler_svc.model.suspicion import LoneLoss
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.queue.waiting_queue import WaitingQueue
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import NEARLY, RunnerPool
from scheduler_svc.scheduler.scheduler import Scheduler

REMEMBERED = 64
"""Number of lost sessions kept because their requests may still prove not to have caused the loss."""

log = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class Incident:
    """A loss and the requests implicated in it. `lone`: set if the loss was of an isolation of one request."""

    suspects: list[Request]
    loss: Loss
    lone: LoneLoss | None = None


class Quarantine:
    """Quarantined requests of one engine; isolates one group at a time."""

    def __init__(self, requests: Requests, pool: RunnerPool, placement: Placement, illness: RunnerIllness) -> None:
        self._requests = requests
        self._pool = pool
        self._placement = placement
        self._illness = illness
        self._groups: deque[list[Request]] = deque()
        self._isolation: Isolation | None = None
        self._reserved: int | None = None
        self._incidents: OrderedDict[int, Incident] = OrderedDict()
        self._put_off: list[Request] = []  # quarantined requests that no runner can hold at the moment

    @property
    def active(self) -> bool:
        """Whether any request is quarantined or isolated."""
        return self._isolation is not None or bool(self._groups or self._put_off) or self._reserved is not None

    @property
    def session(self) -> int | None:
        """Session of the runner of the isolation, or of the one reserved for the next; None if there is neither."""
        return self._reserved if self._isolation is None else self._isolation.session

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their isolation."""
        groups = (*self._groups, self._put_off)
        held = sum(s.phase is Phase.WAITING for group in groups for r in group for s in r.sequences)
        if self._isolation is None:
            return held
        return held + len(self._isolation.queue) + sum(s.phase is Phase.WAITING for s in self._isolation.beyond_limit)

    # ------------------------------------------------------------------ crashes

    def lost(self, session: int, suspects: list[Request], loss: Loss) -> None:
        """Handles the loss of a runner whose sequences all wait again. `suspects`: see `suspects_of`."""
        isolation, self._isolation = (self._isolation, None) if self._is_isolated(session) else (None, self._isolation)
        if self._reserved == session:
            self._reserved = None
        suspects = [request for request in suspects if not request.finished]
        if isolation is not None:
            self._judge(isolation, suspects, loss)
        elif loss is not Loss.LEFT and suspects:
            self._suspect(session, suspects, loss)

    def _is_isolated(self, session: int) -> bool:
        return self._isolation is not None and self._isolation.session == session

    def _suspect(self, session: int, suspects: list[Request], loss: Loss) -> None:
        for request in suspects:
            request.suspicion.strikes += 1
        incident = Incident(suspects, loss)
        if loss is Loss.MEMORY:
            _forgive(incident)
        else:
            self._remember(session, incident)
        self._hold([request for request in suspects if request.suspicion.is_held])

    def _remember(self, session: int, incident: Incident) -> None:
        self._incidents[session] = incident
        while len(self._incidents) > REMEMBERED:
            self._incidents.popitem(last=False)

    def _judge(self, isolation: Isolation, in_flight: list[Request], loss: Loss) -> None:
        """Handles the loss of an isolation's runner: implicates the group's in-flight requests without progress.

        If there are none, all requests in flight are implicated.
        """
        self._empty(isolation)
        tried = _requests(isolation.marks)
        accused = [request for request in in_flight if request in tried] or in_flight
        untried = [request for request in tried if request not in accused and not request.finished]
        if untried:
            self._groups.appendleft(untried)
            self._withdraw(untried)
        if loss is Loss.LEFT or not accused:
            self._hold_first(accused)
        elif len(accused) == 1 and len(in_flight) == 1:
            self._accuse(isolation, accused[0], loss)
        elif len(accused) == 1:
            self._hold_first(accused)  # it was not alone on the runner; next time it will be
        else:
            self._hold(accused)

    def _accuse(self, isolation: Isolation, request: Request, loss: Loss) -> None:
        """Handles the loss of a runner that had one request only: refuses it, or isolates it again.

        It is refused once neither chance nor a fault of the runner is the better explanation.
        """
        suspicion = request.suspicion
        if not suspicion.is_held:  # its losses were discounted since its isolation began: this one is ordinary
            self._suspect(isolation.session, [request], loss)
            return
        if not isolation.proves(request, loss):
            self._hold([request])
            return
        lone = LoneLoss(isolation.runner_id, loss)
        suspicion.lone_losses.append(lone)
        if suspicion.is_rejected:
            self._refuse(request)
        else:
            self._remember(isolation.session, Incident([request], loss, lone))
            self._hold_first([request])

    def _hold(self, requests: list[Request]) -> None:
        """Quarantines the requests as two groups, half of them in each; a single request is one group."""
        requests = [request for request in requests if all(request not in group for group in self._groups)]
        middle = len(requests) // 2
        for group in (requests[:middle], requests[middle:]):
            if group:
                self._groups.append(group)
        self._withdraw(requests)

    def _hold_first(self, requests: list[Request]) -> None:
        if requests:
            self._groups.appendleft(requests)
            self._withdraw(requests)

    def _withdraw(self, requests: list[Request]) -> None:
        """Removes the requests' waiting sequences from all other queues."""
        for request in requests:
            for sequence in request.sequences:
                if sequence.phase is Phase.WAITING:
                    self._requests.discard_waiting(sequence)

    def _refuse(self, request: Request) -> None:
        suspicion = request.suspicion
        message = f"this request can't be served: each time it ran alone on a runner, {suspicion.story}"
        runners = [lone.runner_id for lone in suspicion.lone_losses]
        log.error(
            "a request is refused: it crashes runners",
            request_id=request.request_id,
            tenant=request.tenant,
            runners=runners,
            losses=[lone.loss.value for lone in suspicion.lone_losses],
        )
        for runner_id in runners:
            self._illness.recovered(runner_id)  # the request explains the runner's losses
        refusal = EngineRefusal(grpc.StatusCode.INTERNAL, message)
        self._requests.totals.refuse(RefusalReason.CRASHES_RUNNERS)
        self._requests.outbox.message(request.owner, refusal.to_message(request.handle))
        request.refusal = refusal
        self._requests.finish_request(request, End(FinishReason.ERROR, message=message))

    def clear_if_survived(self, session: int) -> None:
        """Clears the loss of this session if its process came back unharmed: no request has crashed it."""
        incident = self._incidents.get(session)
        if incident is not None and incident.loss.survivable:
            self.clear(session)

    def clear(self, session: int) -> None:
        """Discounts the loss of this session, which its requests did not cause, and releases them."""
        incident = self._incidents.pop(session, None)
        if incident is None:
            return
        _forgive(incident)
        for request in incident.suspects:
            for group in (*self._groups, self._put_off):
                if request in group and not request.suspicion.is_held:
                    group.remove(request)
                    self._release(request)
        self._groups = deque(group for group in self._groups if group)

    def _release(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.phase is Phase.WAITING:
                self._requests.shares.enter(sequence, self._requests.queue)

    def rank_anew(self, rank: Callable[[Sequence], None]) -> None:
        """Ranks all its sequences again after a policy swap; `rank` gives a sequence its rank."""
        for group in (*self._groups, self._put_off):
            for request in group:
                for sequence in request.sequences:
                    rank(sequence)
        if self._isolation is not None:
            for sequence in self._isolation.beyond_limit:
                rank(sequence)
            for sequence in self._isolation.queue.take_all():
                rank(sequence)
                self._isolation.queue.push(sequence)

    # ------------------------------------------------------------------ isolations

    def isolated_queue(self, session: int) -> Queue | None:
        """Returns the queue of an isolation's runner; None for every other runner."""
        return self._isolation.queue if self._isolation is not None and self._is_isolated(session) else None

    def discard(self, sequence: Sequence) -> None:
        """Drops a waiting sequence that has ended."""
        if self._isolation is not None:
            self._isolation.queue.discard(sequence)
            if sequence in self._isolation.beyond_limit:
                self._isolation.beyond_limit.remove(sequence)

    def advance(self) -> None:
        """Ends the isolation once all its sequences have ended or made progress, and begins the next.

        Called each step if `active`.
        """
        isolation = self._isolation
        if isolation is not None:
            for sequence, mark in list(isolation.marks.items()):
                if sequence.phase is Phase.FINISHED or len(sequence.tokens) > mark:
                    del isolation.marks[sequence]
            if isolation.marks:
                return
            self._end_isolation(isolation)
        self._put_off_misfits()
        while self._groups:
            self._groups[0] = [request for request in self._groups[0] if not request.finished]
            if self._groups[0]:
                self._begin_isolation()
                return
            self._groups.popleft()
        self._unreserve()

    def _unreserve(self) -> None:
        """Opens the runner that was reserved for the next isolation to all sequences again."""
        if self._reserved is not None:
            self._placement.open(self._reserved)
            self._reserved = None

    def _wait_for_others(self, session: int) -> int | None:
        """Lets others run first on a runner that was lost with the first group, a single request, alone on it.

        They show whether the runner itself is faulty. Called when there are only such runners. Returns None while the
        others run, otherwise the session for the group that is first by then.
        """
        scheduler = self._pool.schedulers[session]
        if scheduler.has_finished:
            return session
        for place, group in enumerate(self._groups):
            if fits(group, scheduler) and not has_failed_on(group, scheduler):
                self._groups.rotate(-place)
                return session
        placement = self._placement  # parked sequences, which wait for a larger runner, do not count
        others_wait = self._requests.queue.peek() or placement.num_waiting or scheduler.table.num_running
        return None if others_wait else session

    def _end_isolation(self, isolation: Isolation) -> None:
        self._isolation = None
        self._placement.open(isolation.session)
        self._empty(isolation)

    def _empty(self, isolation: Isolation) -> None:
        """Moves the sequences that wait for the isolation's runner back to the shared queue."""
        for sequence in list(isolation.queue):
            isolation.queue.discard(sequence)
            self._requests.queue.push(sequence)
        for sequence in isolation.beyond_limit:
            if sequence.phase is Phase.WAITING:
                self._requests.shares.enter(sequence, self._requests.queue)

    def _put_off_misfits(self) -> None:
        """Takes the requests that no runner can hold out of their groups, so that others get isolated.

        They wait like other `Misfits`, and form groups again when a runner can hold them.
        """
        held = [request for group in self._groups for request in group]
        self._put_off = [request for request in self._put_off if not request.finished and request not in held]
        sizes = [s.most_tokens for s in self._pool.schedulers.values() if not s.leaving]
        if not sizes:
            return
        most, misfits, put_off = max(sizes), self._placement.misfits, self._put_off
        for request in put_off:
            if waiting_limit(request) <= most:
                self._groups.append([request])
                for sequence in request.sequences:
                    misfits.forget(sequence)
        for request in held:
            for sequence in request.sequences if waiting_limit(request) > most else ():
                if sequence.phase is Phase.WAITING and not self._placement.shorten(sequence, NEARLY):
                    misfits.note(sequence)
        too_long = [request for request in held if waiting_limit(request) > most]
        self._put_off = [request for request in put_off if waiting_limit(request) > most] + too_long
        self._groups = deque([r for r in group if waiting_limit(r) <= most] for group in self._groups)

    def _begin_isolation(self) -> None:
        """Begins the isolation of the first group if a runner is empty; otherwise reserves one until it is empty."""
        schedulers = self._pool.schedulers
        session = choose_runner(schedulers, self._illness, self._groups[0], self._reserved)
        if session is not None and has_failed_on(self._groups[0], schedulers[session]):
            session = self._wait_for_others(session)
        if session != self._reserved:
            self._unreserve()
        if session is None:
            return
        scheduler, runner_id = schedulers[session], schedulers[session].hello.runner_id
        if self._reserved is None:
            self._reserved = session
            self._placement.close(session)
        if scheduler.table.num_running or scheduler.in_flight:
            return
        self._reserved = None
        isolation = Isolation(session, runner_id, {}, WaitingQueue(), [], scheduler.probed, scheduler.has_finished)
        self._isolation = isolation
        for request in self._groups.popleft():
            for sequence in request.sequences:
                if sequence.phase is Phase.WAITING:
                    self._requests.discard_waiting(sequence)  # it may have been preempted while its request was held
                    if self._requests.shares.is_held(sequence):
                        isolation.beyond_limit.append(sequence)
                        continue
                    isolation.marks[sequence] = len(sequence.tokens)
                    isolation.queue.push(sequence)
        self._pool.wake(session)


def _forgive(incident: Incident) -> None:
    for request in incident.suspects:
        request.suspicion.forgive(request.num_tokens, incident.lone)


def suspects_of(scheduler: Scheduler) -> list[Request]:
    """Returns the unfinished requests with rows in the runner's unanswered plans."""
    requests: dict[int, Request] = {}
    for flight in scheduler.in_flight:
        for sequence in flight.sequences:
            if sequence.phase is not Phase.FINISHED:
                requests[id(sequence.request)] = sequence.request
    return list(requests.values())


def _requests(marks: dict[Sequence, int]) -> list[Request]:
    requests: dict[int, Request] = {id(sequence.request): sequence.request for sequence in marks}
    return list(requests.values())
