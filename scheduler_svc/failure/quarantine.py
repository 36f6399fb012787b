"""Finds the request that kills runners, so that only that one is refused and its neighbours live.

Suspects are the requests with rows in plans that a lost runner had not answered. A first crash costs a request
nothing: it runs on. From its second on it is held, and runs only in trials: a cohort of suspects alone with itself on a
runner that takes nobody else. Who gets further than it was when it came is acquitted and runs on as before; the cohort
of a runner that is lost is halved. A request that was the only one on its runner is refused once that has happened on
two runners. Where there is only one, that runner must have computed something else in between: other requests where
any wait, else the scheduler's own probe (see `Probation`). A lack of memory is the machine's fault first of all: there
a probe, which needs next to none, proves nothing.

A process that comes back as if nothing had been, or that loses a probe too, absolves those that its loss counted
against, though not for ever (see `Suspicion`). Runners that are held back are in no pool, and so get no trial.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from scheduler_svc.failure.runner_illness import RunnerIllness
from scheduler_svc.failure.suspicion import LoneLoss
from scheduler_svc.failure.trial import Trial, choose_runner, fits, has_failed_on, waiting_limit
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.placement import Placement
from scheduler_svc.refusal import EngineRefusal
from scheduler_svc.refusal_reason import RefusalReason
from scheduler_svc.requests import Requests
from scheduler_svc.runner_pool import NEARLY, RunnerPool
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import End, FinishReason, Phase, Request, Sequence
from scheduler_svc.waiting.tenant_queues import Queue
from scheduler_svc.waiting.waiting_queue import WaitingQueue

REMEMBERED = 64
"""Lost sessions that may still prove to have been nobody's doing."""

log = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class Incident:
    """A loss, and the requests that it counts against. `lone`: of a trial of one."""

    suspects: list[Request]
    loss: Loss
    lone: LoneLoss | None = None


class Quarantine:
    """Holds suspects and tries them, one cohort at a time."""

    def __init__(self, requests: Requests, pool: RunnerPool, placement: Placement, illness: RunnerIllness) -> None:
        self._requests = requests
        self._pool = pool
        self._placement = placement
        self._illness = illness
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
    def session(self) -> int | None:
        """The runner that a trial has, or the next one will have; None where no runner is closed for one."""
        return self._reserved if self._trial is None else self._trial.session

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
            self._judge(trial, suspects, loss)
        elif loss is not Loss.LEFT and suspects:
            self._suspect(session, suspects, loss)

    def _is_tried(self, session: int) -> bool:
        return self._trial is not None and self._trial.session == session

    def _suspect(self, session: int, suspects: list[Request], loss: Loss) -> None:
        for request in suspects:
            request.suspicion.strikes += 1
        incident = Incident(suspects, loss)
        if loss is Loss.MEMORY:
            _pardon(incident)
        else:
            self._remember(session, incident)
        self._hold([request for request in suspects if request.suspicion.is_held])

    def _remember(self, session: int, incident: Incident) -> None:
        self._incidents[session] = incident
        while len(self._incidents) > REMEMBERED:
            self._incidents.popitem(last=False)

    def _judge(self, trial: Trial, in_flight: list[Request], loss: Loss) -> None:
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
            self._accuse(trial, accused[0], loss)
        elif len(accused) == 1:
            self._hold_first(accused)  # it was not alone: next time it is
        else:
            self._hold(accused)

    def _accuse(self, trial: Trial, request: Request, loss: Loss) -> None:
        """It was alone: convicted if chance, and the runner's own illness, are no longer the better explanation."""
        suspicion = request.suspicion
        if not suspicion.is_held:  # absolved since its trial began: this loss counts as it does for anybody
            self._suspect(trial.session, [request], loss)
            return
        if not trial.proves(request, loss):
            self._hold([request])
            return
        lone = LoneLoss(trial.runner_id, loss)
        suspicion.lone_losses.append(lone)
        if suspicion.is_convicted:
            self._refuse(request)
        else:
            self._remember(trial.session, Incident([request], loss, lone))
            self._hold_first([request])

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
                    self._requests.discard_waiting(sequence)

    def _refuse(self, request: Request) -> None:
        suspicion = request.suspicion
        message = f"this request can't be served: each time it was computed alone, {suspicion.story}"
        runners = [lone.runner_id for lone in suspicion.lone_losses]
        log.error(
            "a request is refused: it ends runners",
            request_id=request.request_id,
            tenant=request.tenant,
            runners=runners,
            losses=[lone.loss.value for lone in suspicion.lone_losses],
        )
        for runner_id in runners:
            self._illness.recovered(runner_id)  # its losses are explained
        refusal = EngineRefusal(grpc.StatusCode.INTERNAL, message)
        self._requests.totals.refuse(RefusalReason.CRASHES_RUNNERS)
        self._requests.outbox.message(request.owner, refusal.to_message(request.handle))
        request.refusal = refusal
        self._requests.finish_request(request, End(FinishReason.ERROR, message=message))

    def absolve(self, session: int) -> None:
        """The process that was lost in this session is back, unharmed: nobody there has crashed it."""
        incident = self._incidents.get(session)
        if incident is not None and incident.loss.survivable:
            self.acquit(session)

    def acquit(self, session: int) -> None:
        """The loss of this session was not the doing of what ran there."""
        incident = self._incidents.pop(session, None)
        if incident is None:
            return
        _pardon(incident)
        for request in incident.suspects:
            for cohort in (*self._cohorts, self._put_off):
                if request in cohort and not request.suspicion.is_held:
                    cohort.remove(request)
                    self._release(request)
        self._cohorts = deque(cohort for cohort in self._cohorts if cohort)

    def _release(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.phase is Phase.WAITING:
                self._requests.shares.enter(sequence, self._requests.queue)

    def rank_anew(self, rank: Callable[[Sequence], None]) -> None:
        """Another policy is in force: `rank` gives a sequence its rank."""
        for cohort in (*self._cohorts, self._put_off):
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

    def advance(self) -> None:
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
            self._cohorts[0] = [request for request in self._cohorts[0] if not request.finished]
            if self._cohorts[0]:
                self._begin_trial()
                return
            self._cohorts.popleft()
        self._unreserve()

    def _unreserve(self) -> None:
        """The runner that was kept for the next trial is like any other again."""
        if self._reserved is not None:
            self._placement.open(self._reserved)
            self._reserved = None

    def _wait_for_others(self, session: int) -> int | None:
        """Only runners are there that were lost to the first cohort, a single request: others go first, to show that
        it is not the runner. None while they do; else the runner for the cohort that is first then."""
        scheduler = self._pool.schedulers[session]
        if scheduler.has_finished:
            return session
        for place, cohort in enumerate(self._cohorts):
            if fits(cohort, scheduler) and not has_failed_on(cohort, scheduler):
                self._cohorts.rotate(-place)
                return session
        placement = self._placement  # who waits aside of the queue's order for a larger runner won't come here
        others_wait = self._requests.queue.peek() or placement.num_waiting or scheduler.table.num_running
        return None if others_wait else session

    def _end_trial(self, trial: Trial) -> None:
        self._trial = None
        self._placement.open(trial.session)
        self._empty(trial)

    def _empty(self, trial: Trial) -> None:
        """Whoever waits for the trial's runner waits for any."""
        for sequence in list(trial.queue):
            trial.queue.discard(sequence)
            self._requests.queue.push(sequence)
        for sequence in trial.beyond_limit:
            if sequence.phase is Phase.WAITING:
                self._requests.shares.enter(sequence, self._requests.queue)

    def _put_off_misfits(self) -> None:
        """Suspects that no runner can hold are in no cohort, so that others are tried; they wait as `Misfits` do."""
        held = [request for cohort in self._cohorts for request in cohort]
        self._put_off = [request for request in self._put_off if not request.finished and request not in held]
        sizes = [s.most_tokens for s in self._pool.schedulers.values() if not s.leaving]
        if not sizes:
            return
        most, misfits, put_off = max(sizes), self._placement.misfits, self._put_off
        for request in put_off:
            if waiting_limit(request) <= most:
                self._cohorts.append([request])
                for sequence in request.sequences:
                    misfits.forget(sequence)
        for request in held:
            for sequence in request.sequences if waiting_limit(request) > most else ():
                if sequence.phase is Phase.WAITING and not self._placement.shorten(sequence, NEARLY):
                    misfits.note(sequence)
        too_long = [request for request in held if waiting_limit(request) > most]
        self._put_off = [request for request in put_off if waiting_limit(request) > most] + too_long
        self._cohorts = deque([r for r in cohort if waiting_limit(r) <= most] for cohort in self._cohorts)

    def _begin_trial(self) -> None:
        """The first cohort's, on an empty runner; while there is none, the least loaded one takes nobody else."""
        schedulers = self._pool.schedulers
        session = choose_runner(schedulers, self._illness, self._cohorts[0], self._reserved)
        if session is not None and has_failed_on(self._cohorts[0], schedulers[session]):
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
        trial = Trial(session, runner_id, {}, WaitingQueue(), [], scheduler.probed, scheduler.has_finished)
        self._trial = trial
        for request in self._cohorts.popleft():
            for sequence in request.sequences:
                if sequence.phase is Phase.WAITING:
                    self._requests.discard_waiting(sequence)  # it may have been preempted while its request was held
                    if self._requests.shares.is_held(sequence):
                        trial.beyond_limit.append(sequence)
                        continue
                    trial.marks[sequence] = len(sequence.tokens)
                    trial.queue.push(sequence)
        self._pool.wake(session)


def _pardon(incident: Incident) -> None:
    for request in incident.suspects:
        request.suspicion.pardon(request.num_tokens, incident.lone)


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
