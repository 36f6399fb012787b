"""A `Stack` whose engine has its real link: messages to and from the runner are frames on a socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from roster_protos import engine_pb2
from scheduler_svc.engine.engine import Engine
from scheduler_svc.failure.runner_lifecycle import RECOVERY_S
from scheduler_svc.link.runner_link import RunnerLink
from scheduler_svc.policy import PolicyGuard, load_policy
from tests.support.in_process import Stack
from tests.support.mask_handles import work_inline

PATIENCE_S = 20.0


class LinkedStack(Stack):
    """The link reads the stack's clock, which advances only when a test moves it."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", **settings: object) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoint = endpoint
        super().__init__(**{"depth": 1, **settings})

    def _new_engine(self) -> Engine:
        self.link = self._bind()
        self._endpoint = self.link.endpoint
        policy = PolicyGuard(load_policy(self.settings.policy, {}))
        engine = Engine(self.settings, policy, self.front, self.link, self._clock, self.wall_clock)
        work_inline(engine.constraints)
        return engine

    def _bind(self) -> RunnerLink:
        """Retries, since a former engine's endpoint is only free a moment after its link was closed."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return RunnerLink(
                    self._context, self._endpoint, silence_s=60.0, plan_timeout_s=60.0, clock=lambda: self.now_s
                )
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @property
    def endpoint(self) -> str:
        """Address to which a runner connects."""
        return self._endpoint

    def step_until(self, done: Callable[[], Any], turn: Callable[[], Any] = lambda: None) -> None:
        """Steps the engine, with a `turn` of the other side after each step, until `done()`."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "the condition did not become true"
            self.step()
            turn()
            self.link.sockets[0].poll(2)

    def restart_scheduler(self) -> None:
        """Kills the engine and starts the next at the same endpoint; `take_over` waits for the runner."""
        self.link.close()
        self.front.commands, self.front.messages = [], []
        self.restarts += 1
        self.engine = self._new_engine()
        self.front.put(hello=engine_pb2.WorkerHello(worker=0))

    def take_over(self, turn: Callable[[], Any] = lambda: None) -> None:
        """Waits until the runner has reconnected with its sequences; then each client attaches."""
        self.step_until(lambda: self.engine.pool.schedulers, turn)
        self.now_s += RECOVERY_S
        self.streams = {}
        for request in self.requests.values():
            if not (request.streams and all(stream.end for stream in request.streams)):
                self.attach(request)

    def close(self) -> None:
        """Closes the sockets."""
        self.link.close()
        self._context.term()
