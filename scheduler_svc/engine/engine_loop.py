"""Engine loop: polls the engine's sockets, runs its steps, and drains on request."""

from __future__ import annotations

import gc
import math
import time

import structlog
import zmq

from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.engine_wait import EngineWait
from scheduler_svc.failure.own_pause import forgive
from scheduler_svc.link.curve import link_server
from scheduler_svc.link.front_link import FrontLink
from scheduler_svc.link.runner_link import PAUSE_S, RunnerLink
from scheduler_svc.link.wake_pipe import WakePipe
from scheduler_svc.metrics.snapshot_exchange import SnapshotExchange
from scheduler_svc.metrics.step_phases import StepPhase
from scheduler_svc.policy import PolicyGuard, load_policy, load_retention
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

GC_THRESHOLD = 20_000
"""Allocations between garbage collections: a step makes a few hundred objects, almost none of them in cycles."""

log = structlog.get_logger()


class EngineLoop:
    """The engine with its sockets. `run` must be called in the thread that owns the sockets."""

    def __init__(self, settings: SchedulerSettings, front_endpoint: str) -> None:
        """Binds both links. Raises UnknownPolicy, WrongParameters, UnusableKey, or zmq.ZMQError (endpoint in use)."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        timeout_s = settings.policy_timeout_ms / 1000 or None
        policy = PolicyGuard(load_policy(settings.policy, settings.policy_parameters, settings.policy_dir), timeout_s)
        retention = PolicyGuard(
            load_retention(settings.retention, settings.retention_parameters, settings.policy_dir), timeout_s
        )
        curve = None
        if settings.link_key is not None and settings.link_runners is not None:
            curve = link_server(self._context, settings.link_key, settings.link_runners)
        self._fronts = FrontLink(self._context, front_endpoint)
        self._runners = RunnerLink(
            self._context,
            settings.link,
            silence_s=settings.runner_timeout_s,
            plan_timeout_s=settings.plan_timeout_s,
            clock=time.monotonic,
            curve=curve,
        )
        self.engine = Engine(settings, policy, self._fronts, self._runners, retention=retention)
        self.snapshots = SnapshotExchange()
        """Exchange through which other threads request the engine's metrics."""
        self._pipe = WakePipe()
        self._wait = EngineWait(settings, self.engine.pool, self.engine.phases)
        self.engine.constraints.wake = self._pipe.wake
        self.engine.constraints.starts_early = True
        given = {name: getattr(settings, name) for name in ("depth", "plan_lead_ms", "busy_poll_us", "flush_ms")}
        self._timing = {"profile": settings.profile, **{k: v for k, v in given.items() if v is not None}}
        self._failures_told = 0
        self._told_at = -math.inf
        self._stops = 0
        self._turned_at = time.monotonic()

    def stop(self) -> None:
        """Starts a drain of `drain_s` seconds; a second call ends it at once. Safe from a signal handler."""
        self._stops += 1

    def run(self) -> None:
        """Runs steps until the engine has drained."""
        engine, wait = self.engine, self._wait
        gc.collect()
        gc.freeze()  # objects alive now live as long as the process: collections need not visit them
        gc.set_threshold(GC_THRESHOLD, 20, 20)
        for descriptor in (self.snapshots.reader, self._pipe.reader):
            wait.watch(descriptor)
        for socket in (self._fronts.socket, *self._runners.sockets):
            wait.watch(socket)
        self._turned_at = time.monotonic()
        log.info("the engine runs", link=self._runners.endpoint, policy=engine.policy.policy.name, **self._timing)
        while not engine.shutdown.is_due:
            self._forgive_pause()
            self._pipe.drain()
            engine.step()
            self.snapshots.answer(engine.snapshots.take_snapshot)
            self._tell_failures()
            wait.until(min(engine.wake_at, self._runners.wake_at))
            engine.phases.end(StepPhase.WAIT)
            if self._stops:
                engine.shutdown.begin(None if self._stops == 1 else 0.0)
        engine.shutdown.finish()
        log.info("the engine has drained")

    def _forgive_pause(self) -> None:
        """Forgives timeouts after a pause of this process: a turn otherwise comes at least every half second."""
        engine = self.engine
        now_s = time.monotonic()
        if now_s - self._turned_at > PAUSE_S:
            forgive(engine.lifecycle, engine.requests, engine.pool, now_s - self._turned_at)
        self._turned_at = now_s

    @property
    def fenced(self) -> bool:
        """Whether the loop ended because a successor took over."""
        return self.engine.lifecycle.fenced

    def _tell_failures(self) -> None:
        """Logs failures of the policy, at most once a second."""
        guard, now_s = self.engine.policy, time.monotonic()
        if guard.failures > self._failures_told and now_s - self._told_at >= 1:
            failures = guard.failures - self._failures_told
            log.warning("the policy fails", policy=guard.policy.name, failures=failures, latest=guard.last_failure)
            self._failures_told, self._told_at = guard.failures, now_s

    def close(self) -> None:
        """Closes the sockets and ends the policy's watchdog."""
        self.engine.policy.close()
        self.engine.constraints.wake = lambda: None
        self.engine.constraints.close()
        self._wait.close()
        self._pipe.close()
        self.snapshots.close()
        self._fronts.close()
        self._runners.close()
        self._context.term()
