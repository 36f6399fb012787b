"""Pings the engine periodically; health checks follow from its answers and from missing ones.

Unanswered pings are counted, not seconds: a worker that was itself stopped has sent no pings meanwhile, and so does not
report a stalled engine when it resumes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roster_protos import engine_pb2
from scheduler_svc.front.stream.engine_client import EngineClient

LONGEST_INTERVAL_S = 1.0
"""Interval between two heartbeats, unless `stall_s` is so short that a quarter of it is less."""


class Heartbeat:
    """A worker's view of the progress of the engine and the runners."""

    def __init__(self, client: EngineClient, stall_s: float, on_change: Callable[[], None]) -> None:
        """`stall_s`: seconds without an answer after which the engine counts as hanging. `on_change`: called on the
        event loop when `engine_turns` or `runners_progress` has changed."""
        self._client = client
        self._interval_s = min(LONGEST_INTERVAL_S, stall_s / 4)
        self._most_unanswered = stall_s / self._interval_s
        self._unanswered = 0
        self._on_change = on_change
        self.engine_turns = True
        self.runners_progress = False

    async def run(self) -> None:
        """Pings the engine until cancelled."""
        while True:
            self.ask()
            await asyncio.sleep(self._interval_s)
            self._unanswered += 1
            if self._unanswered >= self._most_unanswered:
                self._set(engine_turns=False, runners_progress=False)

    def ask(self) -> None:
        """Sends a ping at once; used in addition to those of `run` after a change."""
        self._client.send(engine_pb2.Command(ping=engine_pb2.Ping()))

    def answered(self, pong: engine_pb2.Pong) -> None:
        """Takes the engine's answer."""
        self._unanswered = 0
        self._set(engine_turns=True, runners_progress=pong.runners_progress)

    def _set(self, engine_turns: bool, runners_progress: bool) -> None:
        before = (self.engine_turns, self.runners_progress)
        self.engine_turns, self.runners_progress = engine_turns, runners_progress
        if before != (engine_turns, runners_progress):
            self._on_change()
