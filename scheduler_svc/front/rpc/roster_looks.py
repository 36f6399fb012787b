"""Roster snapshots shared by all watchers: the engine is queried at most ten times a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from roster_protos import admin_pb2, engine_pb2
from scheduler_svc.front.stream.engine_client import EngineClient

LEAST_APART_S = 0.1
"""A snapshot younger than this is reused for every watcher."""


class RosterLooks:
    """Cache of the latest roster snapshot."""

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest: admin_pb2.WatchRosterResponse | None = None
        self._taken_s = 0.0

    async def look(self) -> admin_pb2.WatchRosterResponse:
        """Returns a roster that is at most `LEAST_APART_S` old. Raises Refusal if the engine is gone."""
        async with self._lock:  # calls that arrive during a query share its answer
            if self._latest is None or self._clock() - self._taken_s >= LEAST_APART_S:
                handle = self._client.new_handle()
                query = engine_pb2.Command(roster_query=engine_pb2.RosterQuery(handle=handle))
                self._latest = (await self._client.call(handle, query)).roster_reply.roster
                self._taken_s = self._clock()
            return self._latest
