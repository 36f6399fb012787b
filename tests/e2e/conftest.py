from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from protos import admin_pb2
from roster_client.admin import AdminClient

SETTLE_S = 15.0

WaitIdle = Callable[[str], Awaitable[admin_pb2.GetStatusResponse]]


@pytest.fixture
def wait_idle() -> WaitIdle:
    """Waits until nothing waits, runs or holds a block at an admin address, and returns the status then."""

    async def wait(admin_address: str) -> admin_pb2.GetStatusResponse:
        deadline = time.monotonic() + SETTLE_S
        async with AdminClient(admin_address) as admin:
            while True:
                status = await admin.get_status(deadline_s=5)
                (runner,) = status.runners
                busy = status.waiting or status.waiting_tokens or runner.running or runner.plans_in_flight
                if not busy and runner.free_blocks == runner.blocks:
                    return status
                assert time.monotonic() < deadline, f"still busy:\n{status}"
                await asyncio.sleep(0.05)

    return wait
