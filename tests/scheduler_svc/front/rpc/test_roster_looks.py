"""Roster snapshots: shared by concurrent calls, and at least a tenth of a second apart."""

from __future__ import annotations

import asyncio

import pytest

from roster_protos import admin_pb2, engine_pb2
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.base.service_refusals import engine_lost
from scheduler_svc.front.rpc.roster_looks import LEAST_APART_S, RosterLooks


class _Engine:
    """Answers each query with the number of queries so far, when the test allows it."""

    def __init__(self) -> None:
        self.queries = 0
        self.answers = asyncio.Event()
        self.lost = False

    def new_handle(self) -> int:
        return self.queries

    async def call(self, handle: int, command: engine_pb2.Command) -> engine_pb2.FromEngine:
        assert command.roster_query.handle == handle
        self.queries += 1
        await self.answers.wait()
        if self.lost:
            raise engine_lost()
        roster = admin_pb2.WatchRosterResponse(time_s=self.queries)
        return engine_pb2.FromEngine(roster_reply=engine_pb2.RosterReply(handle=handle, roster=roster))


async def test_looks_are_shared_and_apart() -> None:
    engine, now_s = _Engine(), [5.0]
    looks = RosterLooks(engine, lambda: now_s[0])  # type: ignore[arg-type]
    asking = [asyncio.create_task(looks.look()) for _ in range(50)]
    await asyncio.sleep(0)
    engine.answers.set()
    assert {look.time_s for look in await asyncio.gather(*asking)} == {1.0}
    now_s[0] += 0.9 * LEAST_APART_S
    assert (await looks.look()).time_s == 1.0
    now_s[0] += 0.2 * LEAST_APART_S
    assert (await looks.look()).time_s == 2.0 and engine.queries == 2


async def test_a_lost_engine_is_reported_and_queried_again() -> None:
    engine = _Engine()
    engine.answers.set()
    engine.lost = True
    looks = RosterLooks(engine)  # type: ignore[arg-type]
    with pytest.raises(Refusal):
        await looks.look()
    engine.lost = False
    assert (await looks.look()).time_s == 2.0
