"""Probation: a runner that lost plans gets no work until it has computed the scheduler's own probe.

A runner that returns after a loss with plans in flight does not join the pool: nothing is placed on it, no request is
isolated on it, and readiness does not count it. When its hold ends (see `RunnerIllness`), it computes a prompt of one
token, which belongs to no client and is excluded from all counters. If it returns a token, the runner joins the pool.
If the session is lost again, or no token comes, its hold doubles. A lost probe also shows that the requests in flight
at the runner's previous loss did not cause that loss, which no longer counts against them.

A passed probe does not reset the count of consecutive losses; only a finished plan of requests does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.failure.quarantine import Quarantine
from scheduler_svc.failure.runner_illness import Illness, RunnerIllness
from scheduler_svc.link.links import Runners
from scheduler_svc.link.runner_events import GotResult, Loss, Lost
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.scheduler import Scheduler

PROBE_ID = 0
"""Id of the probe's sequence; no sequence of a request has it."""
_PROBE, _RELEASE = 1, 2  # numbers of the plans

log = structlog.get_logger()


@dataclass(slots=True)
class HeldRunner:
    """A session on probation."""

    hello: plan_pb2.Hello
    illness: Illness
    probing: bool = False
    """Whether its probe is in flight."""


@dataclass(slots=True, frozen=True)
class Proven:
    """A runner that has passed its probe; `last_plan`: number of its session's last plan, before any of a request."""

    session: int
    hello: plan_pb2.Hello
    last_plan: int


class Probation:
    """Holds runners back and probes them. One per engine."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        runners: Runners,
        illness: RunnerIllness,
        quarantine: Quarantine,
        announce: Callable[[], None],
    ) -> None:
        """`announce` is called when the set of serving runners may have changed."""
        self._requests = requests
        self._pool = pool
        self._runners = runners
        self._quarantine = quarantine
        self._announce = announce
        self.illness = illness
        self._held: dict[int, HeldRunner] = {}

    @property
    def active(self) -> bool:
        """Whether any runner is on probation."""
        return bool(self._held)

    @property
    def next_due_at(self) -> float:
        """Time at which the next hold ends; infinity if no runner is held."""
        if not self._held:
            return math.inf
        dues = (held.illness.until_at for held in self._held.values() if not held.probing)
        return min(dues, default=math.inf)

    def holds(self, runner_id: str) -> bool:
        """Returns whether this runner is connected and on probation."""
        return any(held.hello.runner_id == runner_id for held in self._held.values())

    def held_back(self) -> list[Illness]:
        """Returns the records of runners that are held back after consecutive losses, connected or not."""
        self._forget()
        serving = {scheduler.hello.runner_id for scheduler in self._pool.schedulers.values()}
        return [illness for illness in self.illness if illness.is_held and illness.runner_id not in serving]

    def _forget(self) -> None:
        """Drops the records of losses that no longer count."""
        self.illness.forget(self._requests.ledger.now_s)
        for scheduler in self._pool.schedulers.values():
            if scheduler.has_finished:
                self.illness.recovered(scheduler.hello.runner_id)

    # ------------------------------------------------------------------ runners

    def takes(self, session: int, hello: plan_pb2.Hello) -> bool:
        """Puts a welcomed runner on probation if it must compute a probe before it may serve. Returns whether it did.

        While any runner has a recent loss, unknown runners must also compute a probe: a faulty machine may return under
        a new name each time.
        """
        self._forget()
        illness = self.illness.of(hello.runner_id)
        if illness is None:
            if not self.illness:
                return False
            illness = Illness(hello.runner_id)
        self._held[session] = HeldRunner(hello, illness)
        self._pool.expect(session, hello)
        self._announce()
        log.info("a runner is on probation", runner=hello.runner_id, losses=illness.losses, hold_s=illness.hold_s)
        return True

    def note_loss(self, scheduler: Scheduler, event: Lost) -> None:
        """Records the loss of a runner of the pool."""
        runner_id = scheduler.hello.runner_id
        if scheduler.has_finished:
            self.illness.recovered(runner_id)
        if scheduler.in_flight and event.loss is not Loss.LEFT:
            illness = self.illness.lost(runner_id, event.reason, self._requests.ledger.now_s)
            illness.session = event.session

    def lost(self, event: Lost) -> None:
        """Handles the end of a session that may be on probation."""
        held = self._discharge(event.session)
        if held is None:
            return
        self._announce()
        if event.loss is Loss.LEFT or not held.probing:
            log.info("a runner left while on probation", runner=held.hello.runner_id, reason=event.reason)
            return
        former = held.illness.session
        illness = self.illness.lost(held.hello.runner_id, event.reason, self._requests.ledger.now_s)
        illness.session = former
        self._requests.totals.losses[event.loss] += 1
        log.error(
            "a runner failed its probe",
            runner=illness.runner_id,
            reason=event.reason,
            losses=illness.losses,
            hold_s=illness.hold_s,
        )
        self._quarantine.clear(former)

    def leave(self, session: int) -> None:
        """Dismisses a leaving runner if it is on probation."""
        if self._discharge(session) is not None:
            self._announce()
            self._runners.dismiss(session)

    def _discharge(self, session: int) -> HeldRunner | None:
        """Ends the session's probation and returns it; None if it was not on probation."""
        self._pool.remove(session)
        return self._held.pop(session, None)

    def end(self) -> None:
        """Dismisses all runners on probation, because a successor has taken over."""
        for session in list(self._held):
            self.leave(session)

    # ------------------------------------------------------------------ probes

    def send_probes(self) -> None:
        """Sends the probes that are due."""
        for session, held in self._held.items():
            if not held.probing and held.illness.until_at <= self._requests.ledger.now_s:
                held.probing = True
                self._runners.send_plan(session, _PROBE, _probe())

    def take_result(self, event: GotResult) -> Proven | None:
        """Takes a result of a session that may be on probation; returns the runner if it has passed its probe."""
        held = self._held.get(event.session)
        if held is None:
            return None
        if event.number != _PROBE or not _has_token(event.result):
            self._runners.drop(event.session, "its probe returned no token")
            return None
        self._discharge(event.session)
        self._runners.send_plan(event.session, _RELEASE, plan_pb2.Plan(releases=pack([0])))
        log.info("a runner passed its probe", runner=held.hello.runner_id)
        return Proven(event.session, held.hello, _RELEASE)


def _has_token(result: plan_pb2.Result) -> bool:
    """Returns whether this is the result of a computed probe: one row, status OK, with one token."""
    return result.statuses == b"\0" and result.token_counts == b"\1" and len(result.tokens) == 4


def _probe() -> plan_pb2.Plan:
    """Returns a plan that admits a prompt of one token to slot 0 and samples one token."""
    sampling = plan_pb2.Sampling(top_p=1, repetition_penalty=1)
    context = engine_pb2.SequenceContext(submit=engine_pb2.Submit(n=1, max_tokens=1))
    sequence = plan_pb2.Admission(
        slot=0,
        sequence_id=PROBE_ID,
        tokens=pack([0]),
        prompt_len=1,
        sampling=sampling,
        blocks=pack([1]),
        context=context.SerializeToString(),
    )
    return plan_pb2.Plan(
        admissions=[sequence],
        extent_slots=pack([0]),
        extent_starts=pack([0]),
        extent_counts=pack([1]),
        extent_flags=b"\1",
    )
