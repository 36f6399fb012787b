"""One faulty runner among three, compared with two healthy ones alone: refused requests, and lost throughput.

The production engine and hash runners run in one process on a virtual clock: a step takes 20 ms, and a killed process
restarts after a second. The faulty runner answers each plan with a fault and continues, answers with a fault and ends,
or is killed at once. Its probes fail too, or succeed, which is the harder case.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.trust.line import Line
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.execution.runner import Runner
from scheduler_svc.link.runner_events import Loss
from tests.support.in_process import Stack, Submitted

STEP_S = 0.02
RESTART_S = 1.0
SLOTS = 8
MOST_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Illness:
    """Kind of fault of the faulty runner's plans."""

    name: str
    loss: Loss
    restart_s: float
    spares_probes: bool = False
    """Whether the scheduler's probes succeed while all other plans fail."""


ILLNESSES = (
    Illness("faults", Loss.FAULT, 0.0),
    Illness("errors and ends", Loss.FAULT, RESTART_S),
    Illness("killed", Loss.GONE, RESTART_S),
    Illness("no memory but for probes", Loss.MEMORY, 0.0, spares_probes=True),
)


class Ward:
    """Runners of one engine, each of which runs one step at a time on the stack's clock."""

    def __init__(self, healthy: int, illness: Illness | None) -> None:
        self.stack = Stack()
        self._illness = illness
        self._events: list[
            tuple[float, int, int]
        ] = []  # (time, serial, session): a step ends or a process has restarted
        self._serial = itertools.count()
        self._busy: set[int] = set()
        self._sessions = itertools.count(1)
        for number in range(healthy):
            self._connect(f"healthy-{number}")
        self.losses = 0
        self._ill = 0
        if illness is not None:
            self._ill = self._connect("ill")

    def _connect(self, runner_id: str) -> int:
        session = next(self._sessions)
        backend = HashBackend(num_slots=SLOTS, num_blocks=SLOTS * 8, eos_probability=0)
        self.stack.runners.connect(session, Runner(backend, runner_id))
        return session

    def run(self) -> float:
        """Serves until all requests have ended; returns the virtual seconds."""
        stack = self.stack
        begin_at = stack.now_s
        while True:
            stack.step()
            if stack.engine.requests.idle:
                return stack.now_s - begin_at
            for session, plans in stack.runners.plans.items():
                if plans and session not in self._busy:
                    self._busy.add(session)
                    seconds = 0.0 if session == self._ill and self._loses(session) else STEP_S
                    heapq.heappush(self._events, (stack.now_s + seconds, next(self._serial), session))
            next_s = self._events[0][0] if self._events else float("inf")
            stack.now_s = max(stack.now_s, min(next_s, stack.engine.wake_at))
            while self._events and self._events[0][0] <= stack.now_s:
                self._happen(heapq.heappop(self._events)[2])

    def _loses(self, session: int) -> bool:
        """Returns whether the faulty runner's next plan is lost."""
        assert self._illness is not None
        _, plan = self.stack.runners.plans[session][0]
        is_probe = bool(plan.releases and not plan.extent_slots) or any(not a.sequence_id for a in plan.admissions)
        return not (self._illness.spares_probes and is_probe)

    def _happen(self, session: int) -> None:
        runners = self.stack.runners
        if session not in runners.runners:  # its process has restarted
            self._ill = self._connect("ill")
            return
        self._busy.discard(session)
        if session != self._ill or not self._loses(session):
            runners.execute(session)
            runners.deliver(session)
            return
        assert self._illness is not None
        self.losses += 1
        runners.kill(session, self._illness.loss)
        heapq.heappush(self._events, (self.stack.now_s + self._illness.restart_s, next(self._serial), session))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one run."""

    seconds: float
    failed: int
    """Requests that were refused or whose answer differs from the reference's."""
    losses: int
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole run."""
        return self.tokens / self.seconds


def serve(requests: int, illness: Illness | None, seed: int = 1) -> Outcome:
    """Serves `requests` requests on two healthy runners, and on a faulty third one if `illness` is given."""
    rng = random.Random(seed)
    ward = Ward(2, illness)
    submitted = [
        ward.stack.submit([rng.randrange(200) for _ in range(rng.randint(1, 24))], rng.randint(1, MOST_TOKENS))
        for _ in range(requests)
    ]
    seconds = ward.run()
    return Outcome(seconds, sum(map(_failed, submitted)), ward.losses, sum(_tokens(submitted)))


def _failed(request: Submitted) -> bool:
    return request.refused is not None or request.streams[0].tokens != request.expected(0, 0.0)


def _tokens(submitted: list[Submitted]) -> Iterator[int]:
    return (len(stream.tokens) for request in submitted for stream in request.streams)


def run(quick: bool) -> Line:
    """Tries all kinds of fault one after another, in one process."""
    requests = 200 if quick else 2000
    healthy = serve(requests, None)
    ill = {illness.name: serve(requests, illness) for illness in ILLNESSES}
    failed = sum(outcome.failed for outcome in ill.values())
    shares = {name: outcome.tokens_per_s / healthy.tokens_per_s for name, outcome in ill.items()}
    tried = f"{len(ill)} x {requests}"
    told = ", ".join(f"{name} {share:.2f} ({ill[name].losses} losses)" for name, share in shares.items())
    return Line(
        promise="one faulty runner of three harms no request",
        figure=f"{failed} of {tried} refused or wrong; tokens/s relative to two healthy runners alone: {told}",
        bar="0 refused; at least 0.9 of the tokens/s of two healthy runners alone",
        met=not failed and min(shares.values()) >= 0.9,
    )
