"""Runners that are there and get no work: what lost plans must compute the scheduler's own probe first.

A runner that comes back after a loss with plans under way is not in the pool: nothing is placed on it, no suspect is
tried there, and readiness does not count it. It waits for the end of its hold (see `RunnerIllness`), and then computes
a prompt of one token, which belongs to no client and is in no count. If a token comes back, the runner joins the pool;
if the session is lost again, or the token does not come, its hold doubles. A probe that is lost also clears what ran
on that runner when it was lost before.

What passes its probe is still watched: only a plan of requests that it finishes ends the row of its losses.
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
"""Id of the probe's sequence: no sequence of a request has it."""
_PROBE, _RELEASE = 1, 2  # numbers of the plans

log = structlog.get_logger()


@dataclass(slots=True)
class HeldRunner:
    """A session on probation."""

    hello: plan_pb2.Hello
    illness: Illness
    probing: bool = False
    """Its probe is under way."""


@dataclass(slots=True, frozen=True)
class Proven:
    """A runner that has computed its probe; `last_plan` of its session was no client's."""

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
        """`announce` is called when which runners serve may have changed."""
        self._requests = requests
        self._pool = pool
        self._runners = runners
        self._quarantine = quarantine
        self._announce = announce
        self.illness = illness
        self._held: dict[int, HeldRunner] = {}

    @property
    def active(self) -> bool:
        """Some runner is on probation."""
        return bool(self._held)

    @property
    def next_due_at(self) -> float:
        """When the next hold ends; infinity where nothing is held."""
        if not self._held:
            return math.inf
        dues = (held.illness.until_at for held in self._held.values() if not held.probing)
        return min(dues, default=math.inf)

    def holds(self, runner_id: str) -> bool:
        """Is this runner there, on probation?"""
        return any(held.hello.runner_id == runner_id for held in self._held.values())

    def held_back(self) -> list[Illness]:
        """The runners that have lost plans several times in a row, and do not serve; connected or not."""
        self._forget()
        serving = {scheduler.hello.runner_id for scheduler in self._pool.schedulers.values()}
        return [illness for illness in self.illness if illness.is_held and illness.runner_id not in serving]

    def _forget(self) -> None:
        """Drops what no longer counts against runners."""
        self.illness.forget(self._requests.ledger.now_s)
        for scheduler in self._pool.schedulers.values():
            if scheduler.has_finished:
                self.illness.recovered(scheduler.hello.runner_id)

    # ------------------------------------------------------------------ runners

    def takes(self, session: int, hello: plan_pb2.Hello) -> bool:
        """Must the runner, which was welcomed, prove itself first? If so it is on probation from now on.

        While plans of any runner were lost lately, newcomers must too: an ill machine may come with a new name each
        time.
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
        log.info("a runner is probed", runner=hello.runner_id, losses=illness.losses, hold_s=illness.hold_s)
        return True

    def note_loss(self, scheduler: Scheduler, event: Lost) -> None:
        """A runner of the pool was lost."""
        runner_id = scheduler.hello.runner_id
        if scheduler.has_finished:
            self.illness.recovered(runner_id)
        if scheduler.in_flight and event.loss is not Loss.LEFT:
            illness = self.illness.lost(runner_id, event.reason, self._requests.ledger.now_s)
            illness.session = event.session

    def lost(self, event: Lost) -> None:
        """A session that may be on probation has ended."""
        held = self._discharge(event.session)
        if held is None:
            return
        self._announce()
        if event.loss is Loss.LEFT or not held.probing:
            log.info("a runner on probation is gone", runner=held.hello.runner_id, reason=event.reason)
            return
        former = held.illness.session
        illness = self.illness.lost(held.hello.runner_id, event.reason, self._requests.ledger.now_s)
        illness.session = former
        self._requests.totals.losses[event.loss] += 1
        log.error(
            "a runner is ill: it has lost the probe too",
            runner=illness.runner_id,
            reason=event.reason,
            losses=illness.losses,
            hold_s=illness.hold_s,
        )
        self._quarantine.clear(former)

    def leave(self, session: int) -> None:
        """A runner says goodbye that may be on probation."""
        if self._discharge(session) is not None:
            self._announce()
            self._runners.dismiss(session)

    def _discharge(self, session: int) -> HeldRunner | None:
        """The session is on probation no longer; None if it was not."""
        self._pool.remove(session)
        return self._held.pop(session, None)

    def end(self) -> None:
        """Nothing more is done here: a successor has taken over."""
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
        """A result of a session that may be on probation: its probe's, or what was under way when it ended. Returns
        the runner if it may serve from now on."""
        held = self._held.get(event.session)
        if held is None:
            return None
        if event.number != _PROBE or not _has_token(event.result):
            self._runners.drop(event.session, "its probe brought no token")
            return None
        self._discharge(event.session)
        self._runners.send_plan(event.session, _RELEASE, plan_pb2.Plan(releases=pack([0])))
        log.info("a runner has computed its probe", runner=held.hello.runner_id)
        return Proven(event.session, held.hello, _RELEASE)


def _has_token(result: plan_pb2.Result) -> bool:
    """Is this what a probe that was computed comes to?"""
    return result.statuses == b"\0" and result.token_counts == b"\1" and len(result.tokens) == 4


def _probe() -> plan_pb2.Plan:
    """A prompt of one token in slot 0, of which one token is sampled."""
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
