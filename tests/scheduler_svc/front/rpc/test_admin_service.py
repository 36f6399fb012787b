"""WatchSteps: a slow reader loses steps in bounded memory; a reader of done steps gets them with their times."""

from __future__ import annotations

import asyncio

from roster_protos import admin_pb2, engine_pb2
from scheduler_svc.front.rpc.admin_service import STEPS_KEPT, AdminService


class _Client:
    """Ignores commands."""

    def __init__(self) -> None:
        self.commands: list[engine_pb2.Command] = []

    def send(self, command: engine_pb2.Command) -> None:
        self.commands.append(command)


class _SlowContext:
    """A call whose writes wait until the test lets them through."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.reports: list[admin_pb2.WatchStepsResponse] = []
        self.reading = asyncio.Event()

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        """Does nothing."""

    async def write(self, report: admin_pb2.WatchStepsResponse) -> None:
        """Blocks like flow control."""
        await self.reading.wait()
        self.numbers.append(report.number)
        self.reports.append(report)


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


async def test_steps_with_their_times_come_when_they_are_done() -> None:
    client, sent, done = _Client(), _SlowContext(), _SlowContext()
    service = AdminService(client)  # type: ignore[arg-type]
    watches = [
        asyncio.create_task(service.WatchSteps(request, context))  # type: ignore[arg-type]
        for request, context in (
            (admin_pb2.WatchStepsRequest(), sent),
            (admin_pb2.WatchStepsRequest(done=True), done),
        )
    ]
    sent.reading.set()
    done.reading.set()
    await asyncio.sleep(0)
    for number in (1, 2):
        service.publish(admin_pb2.WatchStepsResponse(runner="a", number=number))
    service.publish_done(engine_pb2.StepDone(runner="b", number=1, done_s=9))
    service.publish_done(engine_pb2.StepDone(runner="a", number=1, done_s=3.5, run_s=0.25))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sent.numbers == [1, 2]
    assert done.numbers == [1], "step 2 is still running, and the start of b's step was not reported"
    assert (done.reports[0].done_s, done.reports[0].run_s) == (3.5, 0.25)
    assert not sent.reports[0].HasField("done_s")
    for watch in watches:
        watch.cancel()
    await asyncio.wait(watches)
