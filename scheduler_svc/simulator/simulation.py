"""Runs a trace through the production engine on a virtual clock.

Time moves from event to event: a request arrives, a result arrives, or a timer is due. At each event the engine takes
one turn, as it would when its sockets wake it. A turn takes `scheduler_s` per plan, and events during the turn wait for
the next one, so the simulation shows a scheduler that cannot keep up with its runners.

Most turns are alike: a result, and the plan that follows from the last one. The engine takes those between two events
at once (`scheduler_svc/simulator/fast_forward.py`), with the same outcome.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from roster_protos import admin_pb2
from scheduler_svc.engine.engine import Engine
from scheduler_svc.policy import Policy, PolicyGuard, load_policy, load_retention
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from scheduler_svc.simulator.cost_model import CostModel, RunnerShape
from scheduler_svc.simulator.engine_time import EngineTime
from scheduler_svc.simulator.fast_forward import fast_forward, possible_fast_forward
from scheduler_svc.simulator.outcome import Counters, Outcome, outcome_of
from scheduler_svc.simulator.simulated_drafts import SimulatedDrafts
from scheduler_svc.simulator.simulated_front import WORKER, SimulatedFront, early_stops
from scheduler_svc.simulator.simulated_runners import SimulatedRunners
from scheduler_svc.simulator.trace import Trace
from scheduler_svc.simulator.virtual_clock import VirtualClock

MOST_IDLE_TURNS = 2_000
"""Consecutive turns without an event or a plan, half a second apart, after which the simulation is considered stuck."""
GC_THRESHOLD = 50_000
"""Objects between garbage collections, as in the engine's loop."""

PROGRESS_S = 0.2
"""Seconds of wall time between two reports of progress."""

StepObserver = Callable[[admin_pb2.WatchStepsResponse], bool | None]
"""Receives a completed step; False: it wants no more, and the rest of the simulation is as fast as without it."""
ProgressObserver = Callable[[float], None]
"""Receives the share of the trace that is done, 0 to 1: the mean of the requests that have arrived and have ended."""


class SimulationStuck(RuntimeError):
    """Requests wait that no plan will ever serve: the policy admits no sequence, or the runner is too small."""


@dataclass(slots=True, frozen=True)
class Setup:
    """Setup on which a trace is run. A size that is None is taken from the cost model's runner."""

    cost: CostModel
    policy: str | Policy = "auto"
    parameters: dict[str, Any] = field(default_factory=dict)
    runners: int = 1
    slots: int | None = None
    kv_tokens: int | None = None
    host_kv_tokens: int | None = None
    block_size: int | None = None
    step_tokens: int | None = None
    depth: int = 2
    prefix_sharing: bool = False
    retention: str | Policy = "lru"
    """What the prefix caches keep."""
    retention_parameters: dict[str, Any] = field(default_factory=dict)
    hints: bool = True
    """Whether clients send the hints that the trace has, and ids of conversations."""
    plan_lead_ms: float | None = None
    """Milliseconds before a runner completes its plans in flight at which its next plan is made; None: as soon as the
    depth allows."""
    profile: str | None = None
    """Times plans as this profile of the service does, instead of by `depth` and `plan_lead_ms`. Turns are then taken
    one by one."""
    scheduler_s: float = 150e-6
    """Seconds that the engine's thread takes per plan."""
    spread: float = 0.0
    """Standard deviation of the logarithm of a step's time around the cost model."""
    max_drafts: int = 0
    """Maximum number of tokens that a row drafts; 0: the runners have no drafter."""
    acceptance: tuple[float, ...] = (0.7,)
    """Share of the drafts that are right where all before them in the row are, by place from the first; the last one
    counts for all later places. A trace may have others for single requests."""
    seed: int = 0
    fast_forwards: bool = True
    """Take equal turns at once (see `fast_forward`); the outcome does not depend on it."""
    check: bool = False
    """Check the scheduler's invariants after every plan (slow)."""

    @property
    def shape(self) -> RunnerShape:
        """Sizes of the runners."""
        names = ("slots", "kv_tokens", "host_kv_tokens", "block_size", "step_tokens")
        given = {name: getattr(self, name) for name in names}
        return self.cost.runner.model_copy(update={name: value for name, value in given.items() if value is not None})

    def settings(self) -> SchedulerSettings:
        """Returns the engine's settings: the queue has no limit, and finished requests are not kept."""
        values: dict[str, Any] = {
            "policy": self.policy if isinstance(self.policy, str) else self.policy.name,
            "policy_parameters": self.parameters,
            **self._timing(),
            "prefix_sharing": self.prefix_sharing,
            "isolate_tenants": False,
            "retention": self.retention if isinstance(self.retention, str) else self.retention.name,
            "retention_parameters": self.retention_parameters,
            "max_waiting_requests": 1 << 30,
            "max_waiting_tokens": 1 << 60,
            "retention_s": 0,
            "retention_requests": 0,
            "check": self.check,
        }
        return SchedulerSettings.read(**values)

    def _timing(self) -> dict[str, Any]:
        if self.profile is not None:
            return {"profile": self.profile}
        return {"depth": self.depth, "plan_lead_ms": math.inf if self.plan_lead_ms is None else self.plan_lead_ms}


class Simulation:
    """One engine with simulated clients and runners. `run` plays the trace to its end."""

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        on_step: StepObserver | None = None,
        on_progress: ProgressObserver | None = None,
    ) -> None:
        """`on_step` receives every completed step. Raises UnknownPolicy, WrongParameters or WrongAcceptance."""
        self.setup = setup
        self._on_progress = on_progress
        self.clock = VirtualClock()
        policy = load_policy(setup.policy, setup.parameters) if isinstance(setup.policy, str) else setup.policy
        shape, rng = setup.shape, random.Random(setup.seed)
        self.front = SimulatedFront(
            trace, self.clock, setup.cost.front_s, shape.vocab_size, setup.prefix_sharing, setup.hints
        )
        self.runners = SimulatedRunners(
            setup.runners,
            setup.cost,
            shape,
            self.clock,
            early_stops(trace),
            (lambda: rng.lognormvariate(0.0, setup.spread)) if setup.spread else None,
            reports_early=setup.profile is not None,
            drafts=_drafts(trace, setup),
            max_drafts=setup.max_drafts,
        )
        kept = setup.retention
        if isinstance(kept, str):
            kept = load_retention(kept, setup.retention_parameters)
        self.engine = Engine(
            setup.settings(), PolicyGuard(policy), self.front, self.runners, self.clock, retention=PolicyGuard(kept)
        )
        if on_step is not None:
            self._on_step = on_step
            self.front.on_step = self._watch
            self.engine.watchers.of_steps.add(WORKER)
        self.engine_time = EngineTime()
        self._idle_turns = 0

    def run(self) -> Outcome:
        """Runs until every request has ended. Raises SimulationStuck."""
        begin = time.perf_counter()
        with _few_collections():
            self.turn()  # runners join
            reported = begin
            while not self.front.done:
                self._advance()
                if not self._fast_forward():
                    self.turn()
                if self.front.on_step is None:
                    self.engine.watchers.of_steps.discard(WORKER)
                if self._on_progress is not None and time.perf_counter() - reported >= PROGRESS_S:
                    self._on_progress(self.front.share_done)
                    reported = time.perf_counter()
        return outcome_of(self.front, self._counters(time.perf_counter() - begin))

    def _watch(self, report: admin_pb2.WatchStepsResponse) -> None:
        if self._on_step(report) is False:
            self.front.on_step = None

    def turn(self, *, is_sample: bool = False) -> None:
        """Takes one turn of the engine and advances the clock by its time. `is_sample`: it could have been skipped."""
        begin = time.perf_counter()
        self.engine.step()
        self.engine_time.took(time.perf_counter() - begin, is_sample)
        plans = self.runners.num_sent
        self.clock.now_s += self.setup.scheduler_s * plans
        self.runners.dispatch()
        self.front.stamp()

    def _fast_forward(self) -> bool:
        """Takes as many equal turns at once as possible. Returns False if the next turn must be taken alone."""
        chance = possible_fast_forward(self.engine) if self.setup.fast_forwards else None
        if chance is None:
            return False
        scheduler_s, until_at = self.setup.scheduler_s, min(self.front.next_s, chance.before_at)
        if self.engine_time.wants_sample and self.runners.next_s <= self.clock.now_s < until_at:
            self.turn(is_sample=True)
            return True
        times_s = self.runners.fast_forward(chance, until_at, scheduler_s)
        if not times_s:
            return False
        self.engine_time.skipped(len(times_s))
        fast_forward(self.engine, chance, times_s, self.runners.tokens(chance.num_rows, len(times_s)))
        left_s = [time_s + scheduler_s for time_s in times_s]
        self.clock.now_s = left_s[-1]
        self.front.stamp_each(left_s)
        return True

    def _advance(self) -> None:
        """Moves the clock to the next event, unless one has occurred while the engine was busy."""
        due_at = min(self.front.next_s, self.runners.next_s)
        reminder_at = self.engine.requests.book.next_due_at
        if reminder_at is not None:
            due_at = min(due_at, reminder_at)
        due_at = min(due_at, self.engine.pool.next_due_at, self.engine.ledger.prefetch_at)
        if due_at < float("inf"):
            self._idle_turns = 0
        else:
            due_at = self.engine.wake_at
            self._idle_turns += 1
            if self._idle_turns > MOST_IDLE_TURNS:
                waiting = len(self.engine.requests.queue)
                raise SimulationStuck(
                    f"{waiting} sequences wait but none can be admitted: check that the policy admits sequences and "
                    "that the KV cache holds the longest request"
                )
        self.clock.now_s = max(self.clock.now_s, due_at)

    def _counters(self, wall_s: float) -> Counters:
        engine, tallies, measured = self.engine, self.runners.tallies, self.engine.requests.measurements
        measured.count()
        schedulers = engine.pool.schedulers.values()
        return Counters(
            plans=tallies.steps,
            rows=tallies.rows,
            step_tokens=tallies.tokens,
            busy_s=tallies.busy_s,
            slots=self.setup.shape.slots,
            runners=self.setup.runners,
            preemptions=engine.requests.totals.preemptions + sum(s.preemptions for s in schedulers),
            cached_tokens=engine.requests.totals.cached_tokens + sum(s.cached_tokens for s in schedulers),
            policy_failures=engine.policy.failures + engine.retention.failures,
            decode_rows=measured.decode_rows,
            drafted_tokens=measured.drafts.drafted_tokens,
            accepted_tokens=measured.drafts.accepted_tokens,
            virtual_s=self.clock.now_s,
            engine_s=self.engine_time.total_s,
            wall_s=wall_s,
        )


def _drafts(trace: Trace, setup: Setup) -> SimulatedDrafts | None:
    """Returns the runners' drafter. Raises WrongAcceptance."""
    if not setup.max_drafts:
        return None
    own = {str(index): request.acceptance for index, request in enumerate(trace.requests) if request.acceptance}
    return SimulatedDrafts(setup.runners, setup.shape.slots, setup.max_drafts, setup.acceptance, setup.seed, own)


def simulate(
    trace: Trace, setup: Setup, on_step: StepObserver | None = None, on_progress: ProgressObserver | None = None
) -> Outcome:
    """Plays the trace. `on_step` receives every completed step, `on_progress` the progress a few times a second.

    Raises SimulationStuck, or ValueError for an invalid policy, parameters or runner.
    """
    return Simulation(trace, setup, on_step, on_progress).run()


@contextmanager
def _few_collections() -> Iterator[None]:
    """Context with garbage collection set as in the engine's loop; existing objects are not collected.

    A caller that has frozen its objects keeps them frozen: they may be a million, of which each simulation would
    otherwise make a collection.
    """
    threshold, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not is_frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        if not is_frozen:
            gc.unfreeze()
