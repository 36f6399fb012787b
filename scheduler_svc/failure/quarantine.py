"""Finds the request that kills runners, so that only that one is refused and its neighbours live.

Suspects are the requests with rows in plans that a lost runner had not answered. A first crash costs a request
nothing: it runs on. From its second on it is held, and runs only in trials: a cohort of suspects alone with itself on a
runner that takes nobody else. Who gets further than it was when it came is acquitted and runs on as before; the cohort
of a runner that is lost is halved. A request that was the only one on its runner is the one, and is refused: at once
where the loss proves a crash, and from the second time on where it may have been the network.

A process that comes back as if nothing had been absolves those that its loss counted against, though not for ever
(see `Suspicion`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import structlog

from scheduler_svc.intake import EngineRefusal
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.refusal_reason import RefusalReason
from scheduler_svc.runner_pool import NEARLY
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import End, FinishReason, Phase, Request, Sequence
from scheduler_svc.waiting.tenant_queues import Queue
from scheduler_svc.waiting.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine

REMEMBERED = 64
"""Lost sessions that may still prove to have been harmless."""

log = structlog.get_logger()


@dataclass(slots=True)
class Trial:
    """A cohort on its runner. `marks`: tokens of each sequence at the beginning, until it has got further."""

    session: int
    marks: dict[Sequence, int]
    queue: WaitingQueue
    beyond_limit: list[Sequence]
    """Of the same requests, those that wait as their tenant runs as many as it may."""


@dataclass(slots=True, frozen=True)
class Incident:
    """A loss that its process may survive, and the requests that it counts against. `lone`: it was a trial of one."""

    suspects: list[Request]
    lone: bool = False


class Quarantine:
    """Holds suspects and tries them, one cohort at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cohorts: deque[list[Request]] = deque()
        self._trial: Trial | None = None
        self._reserved: int | None = None
        self._incidents: OrderedDict[int, Incident] = OrderedDict()
        self._put_off: list[Request] = []  # suspects that no runner can hold at the moment

    @property
    def active(self) -> bool:
        """Somebody is held or tried."""
        return self._trial is not None or bool(self._cohorts or self._put_off) or self._reserved is not None

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their trial."""
        cohorts = (*self._cohorts, self._put_off)
        held = sum(s.phase is Phase.WAITING for cohort in cohorts for r in cohort for s in r.sequences)
        if self._trial is None:
            return held
        return held + len(self._trial.queue) + sum(s.phase is Phase.WAITING for s in self._trial.beyond_limit)

    # ------------------------------------------------------------------ crashes

    def lost(self, session: int, suspects: list[Request], loss: Loss) -> None:
        """A runner was lost, and all that ran there waits again. `suspects`: see `suspects_of`."""
        trial, self._trial = (self._trial, None) if self._is_tried(session) else (None, self._trial)
        if self._reserved == session:
            self._reserved = None
        suspects = [request for request in suspects if not request.finished]
        if trial is not None:
            self._judge(session, trial, suspects, loss)
        elif loss is not Loss.LEFT and suspects:
            self._suspect(session, suspects, loss)

    def _is_tried(self, session: int) -> bool:
        return self._trial is not None and self._trial.session == session

    def _suspect(self, session: int, suspects: list[Request], loss: Loss) -> None:
        for request in suspects:
            request.suspicion.strikes += 1
        if loss.survivable:
            self._remember(session, Incident(suspects))
        self._hold([request for request in suspects if request.suspicion.is_held])

    def _remember(self, session: int, incident: Incident) -> None:
        self._incidents[session] = incident
        while len(self._incidents) > REMEMBERED:
            self._incidents.popitem(last=False)

    def _judge(self, session: int, trial: Trial, in_flight: list[Request], loss: Loss) -> None:
        """The runner of a trial was lost: by one of those that had not got further yet, as far as anybody can tell."""
        self._empty(trial)
        tried = _requests(trial.marks)
        accused = [request for request in in_flight if request in tried] or in_flight
        untried = [request for request in tried if request not in accused and not request.finished]
        if untried:
            self._cohorts.appendleft(untried)
            self._withdraw(untried)
        if loss is Loss.LEFT or not accused:
            self._hold_first(accused)
        elif len(accused) == 1 and len(in_flight) == 1:
            self._convict(session, accused[0], loss)
        elif len(accused) == 1:
            self._hold_first(accused)  # it was not alone: next time it is
        else:
            self._hold(accused)

    def _convict(self, session: int, request: Request, loss: Loss) -> None:
        """It was alone: it is the one, unless the loss may be the network's doing."""
        if not request.suspicion.is_held:  # absolved since its trial began: this loss counts as it does for anybody
            self._suspect(session, [request], loss)
            return
        if loss.survivable:
            request.suspicion.lone_losses += 1
            if not request.suspicion.is_convicted:
                self._remember(session, Incident([request], lone=True))
                self._hold_first([request])
                return
        self._refuse(request)

    def _hold(self, requests: list[Request]) -> None:
        """Two cohorts, each half of them; one that is alone is a cohort too."""
        requests = [request for request in requests if all(request not in cohort for cohort in self._cohorts)]
        middle = len(requests) // 2
        for cohort in (requests[:middle], requests[middle:]):
            if cohort:
                self._cohorts.append(cohort)
        self._withdraw(requests)

    def _hold_first(self, requests: list[Request]) -> None:
        if requests:
            self._cohorts.appendleft(requests)
            self._withdraw(requests)

    def _withdraw(self, requests: list[Request]) -> None:
        """They wait here, and nowhere else."""
        for request in requests:
            for sequence in request.sequences:
                if sequence.phase is Phase.WAITING:
                    self._engine.discard_waiting(sequence)

    def _refuse(self, request: Request) -> None:
        engine = self._engine
        message = "this request ended the process that computed it, each time it was tried: it can't be served"
        log.error("a request is refused: it ends runners", request_id=request.request_id, tenant=request.tenant)
        refusal = EngineRefusal(grpc.StatusCode.INTERNAL, message)
        engine.totals.refuse(RefusalReason.CRASHES_RUNNERS)
        engine.outbox.message(request.owner, refusal.to_message(request.handle))
        request.refusal = refusal
        engine.finish_request(request, End(FinishReason.ERROR, message=message))

    def absolve(self, session: int) -> None:
        """The process that was lost in this session is back, unharmed: nobody there has crashed it."""
        incident = self._incidents.pop(session, None)
        if incident is None:
            return
        for request in incident.suspects:
            request.suspicion.pardon(request.num_tokens, incident.lone)
            for cohort in self._cohorts:
                if request in cohort and not request.suspicion.is_held:
                    cohort.remove(request)
                    self._release(request)
        self._cohorts = deque(cohort for cohort in self._cohorts if cohort)

    def _release(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.phase is Phase.WAITING:
                self._engine.shares.enter(sequence, self._engine.queue)

    def rank_anew(self, rank: Callable[[Sequence], None]) -> None:
        """Another policy is in force: `rank` gives a sequence its rank."""
        for cohort in self._cohorts:
            for request in cohort:
                for sequence in request.sequences:
                    rank(sequence)
        if self._trial is not None:
            for sequence in self._trial.beyond_limit:
                rank(sequence)
            for sequence in self._trial.queue.take_all():
                rank(sequence)
                self._trial.queue.push(sequence)

    # ------------------------------------------------------------------ trials

    def trial_queue(self, session: int) -> Queue | None:
        """Where the runner of a trial takes sequences from; None for every other runner."""
        return self._trial.queue if self._trial is not None and self._is_tried(session) else None

    def discard(self, sequence: Sequence) -> None:
        """A waiting sequence has ended."""
        if self._trial is not None:
            self._trial.queue.discard(sequence)
            if sequence in self._trial.beyond_limit:
                self._trial.beyond_limit.remove(sequence)

    def settle(self) -> None:
        """Acquits who got further, ends a trial when everybody has, and begins the next. Called each step if active."""
        trial = self._trial
        if trial is not None:
            for sequence, mark in list(trial.marks.items()):
                if sequence.phase is Phase.FINISHED or len(sequence.tokens) > mark:
                    del trial.marks[sequence]
            if trial.marks:
                return
            self._end_trial(trial)
        self._put_off_misfits()
        while self._cohorts:
            cohort = [request for request in self._cohorts[0] if not request.finished]
            if cohort:
                self._begin_trial(cohort)
                return
            self._cohorts.popleft()
        if self._reserved is not None:
            self._engine.placement.open(self._reserved)
            self._reserved = None

    def _end_trial(self, trial: Trial) -> None:
        self._trial = None
        self._engine.placement.open(trial.session)
        self._empty(trial)

    def _empty(self, trial: Trial) -> None:
        """Whoever waits for the trial's runner waits for any."""
        for sequence in list(trial.queue):
            trial.queue.discard(sequence)
            self._engine.queue.push(sequence)
        for sequence in trial.beyond_limit:
            if sequence.phase is Phase.WAITING:
                self._engine.shares.enter(sequence, self._engine.queue)

    def _put_off_misfits(self) -> None:
        """Suspects that no runner can hold are in no cohort, so that others are tried; they wait as `Misfits` do."""
        held = [request for cohort in self._cohorts for request in cohort]
        self._put_off = [request for request in self._put_off if not request.finished and request not in held]
        sizes = [s.most_tokens for s in self._engine.pool.schedulers.values() if not s.leaving]
        if not sizes:
            return
        most, misfits, put_off = max(sizes), self._engine.placement.misfits, self._put_off
        for request in put_off:
            if request.limit <= most:
                self._cohorts.append([request])
                for sequence in request.sequences:
                    misfits.forget(sequence)
        for request in held:
            for sequence in request.sequences if request.limit > most else ():
                if sequence.phase is Phase.WAITING and not self._engine.placement.shorten(sequence, NEARLY):
                    misfits.note(sequence)
        too_long = [request for request in held if request.limit > most and not request.finished]
        self._put_off = [request for request in put_off if request.limit > most] + too_long
        self._cohorts = deque([r for r in cohort if r.limit <= most] for cohort in self._cohorts)

    def _begin_trial(self, cohort: list[Request]) -> None:
        """On an empty runner; while there is none, the least loaded one takes nobody until it is."""
        most = max(request.limit for request in cohort)
        schedulers = self._engine.pool.schedulers.items()
        runners = {session: s for session, s in schedulers if not s.leaving and s.most_tokens >= most}
        if not runners:
            return
        if self._reserved not in runners:
            if self._reserved is not None:  # it is too small
                self._engine.placement.open(self._reserved)
            self._reserved = min(runners, key=lambda session: runners[session].table.num_running)
            self._engine.placement.close(self._reserved)
        session = self._reserved
        if runners[session].table.num_running or runners[session].in_flight:
            return
        self._cohorts.popleft()
        self._reserved = None
        trial = self._trial = Trial(session, {}, WaitingQueue(), [])
        for request in cohort:
            for sequence in request.sequences:
                if sequence.phase is Phase.WAITING:
                    self._engine.discard_waiting(sequence)  # it may have been preempted while its request was held
                    if self._engine.shares.is_held(sequence):
                        trial.beyond_limit.append(sequence)
                        continue
                    trial.marks[sequence] = len(sequence.tokens)
                    trial.queue.push(sequence)
        self._engine.pool.wake(session)


def suspects_of(scheduler: Scheduler) -> list[Request]:
    """The requests with rows in plans that are not answered."""
    requests: dict[int, Request] = {}
    for flight in scheduler.in_flight:
        for sequence in flight.sequences:
            if sequence.phase is not Phase.FINISHED:
                requests[id(sequence.request)] = sequence.request
    return list(requests.values())


def _requests(marks: dict[Sequence, int]) -> list[Request]:
    requests: dict[int, Request] = {id(sequence.request): sequence.request for sequence in marks}
    return list(requests.values())
