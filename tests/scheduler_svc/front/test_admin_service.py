"""WatchSteps and a reader that does not keep up: memory is bounded, and the step numbers show what was missed."""

from __future__ import annotations

import asyncio

from protos import admin_pb2, engine_pb2
from scheduler_svc.front.admin_service import STEPS_KEPT, AdminService


class _Client:
    """Takes commands and does nothing."""

    def __init__(self) -> None:
        self.commands: list[engine_pb2.Command] = []

    def send(self, command: engine_pb2.Command) -> None:
        self.commands.append(command)


class _SlowContext:
    """A call whose writes wait until the test lets them through."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.reading = asyncio.Event()

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """Nothing to do."""

    async def write(self, report: admin_pb2.WatchStepsResponse) -> None:
        """Blocks like flow control."""
        await self.reading.wait()
        self.numbers.append(report.number)


async def test_a_slow_watcher_misses_the_oldest_steps() -> None:
    client, context = _Client(), _SlowContext()
    service = AdminService(client)  # type: ignore[arg-type]
    watch = asyncio.create_task(service.WatchSteps(admin_pb2.WatchStepsRequest(), context))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    total = 3 * STEPS_KEPT
    for number in range(1, total + 1):
        service.publish(admin_pb2.WatchStepsResponse(number=number))
        await asyncio.sleep(0)
    context.reading.set()
    async with asyncio.timeout(5):
        while not context.numbers or context.numbers[-1] != total:
            await asyncio.sleep(0)
    assert context.numbers == [1, *range(total - STEPS_KEPT + 1, total + 1)]
    watch.cancel()
    await asyncio.wait({watch})
    assert [command.watch.on for command in client.commands] == [True, False]
