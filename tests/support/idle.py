"""Waits until a service is idle."""

from __future__ import annotations

import asyncio
import time

from roster_client.client.admin import AdminClient
from roster_protos import admin_pb2

SETTLE_S = 15.0


async def wait_idle_at(admin_address: str) -> admin_pb2.GetStatusResponse:
    """Returns the status once nothing waits, runs or holds a block of the only runner."""
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
