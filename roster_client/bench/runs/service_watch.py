"""Samples a Roster server's batch fill and queue over its admin API during a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roster_client.bench.records.record import ServiceSample
from roster_client.client.admin import AdminClient
from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import RosterError
from roster_protos import admin_pb2

INTERVAL_S = 0.25


class ServiceWatch:
    """Fills `samples` while `run` runs; `now_s` returns seconds since the run's start."""

    def __init__(
        self,
        address: str,
        now_s: Callable[[], float],
        *,
        interval_s: float = INTERVAL_S,
        credentials: Credentials = IN_THE_CLEAR,
    ) -> None:
        self._address = address
        self._now_s = now_s
        self._interval_s = interval_s
        self._credentials = credentials
        self.samples: list[ServiceSample] = []

    async def run(self) -> None:
        """Takes samples until cancelled; omits samples that fail."""
        async with AdminClient(self._address, credentials=self._credentials) as client:
            while True:
                try:
                    status = await client.get_status(deadline_s=5)
                    self.samples.append(sample_of(status, self._now_s()))
                except RosterError:
                    pass
                await asyncio.sleep(self._interval_s)


def sample_of(status: admin_pb2.GetStatusResponse, time_s: float) -> ServiceSample:
    """Returns a sample with the sums over all runners."""
    runners = status.runners
    return ServiceSample(
        time_s=time_s,
        running=sum(runner.running for runner in runners),
        slots=sum(runner.slots for runner in runners),
        waiting=status.waiting,
        used_blocks=sum(runner.blocks - runner.free_blocks for runner in runners),
        blocks=sum(runner.blocks for runner in runners),
        preemptions=status.totals.preemptions,
        plans=status.totals.plans,
    )


async def service_settings(address: str, credentials: Credentials = IN_THE_CLEAR) -> dict[str, object]:
    """Returns policy, slots, blocks and device of a server, for a run's header. Raises RosterError."""
    async with AdminClient(address, credentials=credentials) as client:
        status = await client.get_status(deadline_s=10)
    return {
        "policy": status.policy,
        "policy_parameters": status.policy_parameters,
        "runners": len(status.runners),
        "slots": sum(runner.slots for runner in status.runners),
        "blocks": sum(runner.blocks for runner in status.runners),
        "block_size": max((runner.block_size for runner in status.runners), default=0),
        "device": ", ".join(sorted({runner.device for runner in status.runners})),
        "server_version": status.version,
    }
