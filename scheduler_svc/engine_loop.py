"""Runs the engine: waits on its sockets, steps, and drains when told to."""

from __future__ import annotations

import gc
import math
import threading
import time

import structlog
import zmq

from scheduler_svc.engine import Engine
from scheduler_svc.front_link import FrontLink
from scheduler_svc.policy import PolicyGuard, load_policy
from scheduler_svc.runner_link import RunnerLink
from scheduler_svc.sequence import End, FinishReason
from scheduler_svc.settings import SchedulerSettings

GC_THRESHOLD = 20_000
"""Objects between collections: a step makes a few hundred, nearly none of them in cycles."""

log = structlog.get_logger()


class EngineLoop:
    """The engine with its sockets. `run` must be called in the thread that is to own them."""

    def __init__(self, settings: SchedulerSettings, front_endpoint: str) -> None:
        """Binds both links. Raises UnknownPolicy or WrongParameters, or zmq.ZMQError when an endpoint is taken."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        policy = PolicyGuard(load_policy(settings.policy, settings.policy_parameters))
        self._settings = settings
        self._fronts = FrontLink(self._context, front_endpoint)
        self._runners = RunnerLink(
            self._context,
            settings.link,
            silence_s=settings.runner_timeout_s,
            plan_timeout_s=settings.plan_timeout_s,
            clock=time.monotonic,
        )
        self.engine = Engine(settings, policy, self._fronts, self._runners)
        self._drain = threading.Event()
        self._hurry = threading.Event()

    def stop(self) -> None:
        """Drains: nothing new, what runs gets `drain_s`. A second call ends it at once. Safe from a signal handler."""
        if self._drain.is_set():
            self._hurry.set()
        self._drain.set()

    def run(self) -> None:
        """Steps until drained."""
        engine, poller = self.engine, zmq.Poller()
        gc.collect()
        gc.freeze()  # what is here now stays: no collection needs to look at it
        gc.set_threshold(GC_THRESHOLD, 20, 20)
        poller.register(self._fronts.socket, zmq.POLLIN)
        poller.register(self._runners.socket, zmq.POLLIN)
        log.info("the engine runs", link=self._runners.endpoint, policy=engine.policy.policy.name)
        while not self._drain.is_set():
            engine.step()
            poller.poll(_ms_until(engine.wake_s))
        engine.drain()
        until_s = time.monotonic() + self._settings.drain_s
        while not (engine.idle or self._hurry.is_set() or time.monotonic() > until_s):
            engine.step()
            poller.poll(_ms_until(min(engine.wake_s, until_s)))
        engine.finish_all(End(FinishReason.UNAVAILABLE, message="the service shut down"))
        engine.step()
        log.info("the engine has drained")

    def close(self) -> None:
        """Closes the sockets."""
        self._fronts.close()
        self._runners.close()
        self._context.term()


def _ms_until(at_s: float) -> int:
    """Whole milliseconds, rounded up, so that what is due then is due when the wait ends."""
    return max(0, math.ceil((at_s - time.monotonic()) * 1000))
