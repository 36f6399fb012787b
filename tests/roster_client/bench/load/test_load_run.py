"""The open-loop client against targets that are slow, that fail, or that block it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from roster_client.bench.load.load_run import LoadRun, counted
from roster_client.bench.load.target import Answer, RequestFailed
from roster_client.bench.load.workload import LoadRequest, Workload
from roster_client.bench.records.record import Run, RunHeader, Status, TokenCounts
from roster_client.bench.records.summary import summarize
from roster_client.bench.runs.measurement import SystemUnderLoad, measure


@dataclass
class FakeTarget:
    """Serves each request by a function of its number; records the times of sending."""

    act: Callable[[int, Callable[[int], None]], object]
    url: str = "fake"
    sent: list[float] = field(default_factory=list)

    def prepare(self, request: LoadRequest) -> int:
        return int(request.request_id)

    async def serve(self, prepared: int, take: Callable[[int], None]) -> Answer:
        self.sent.append(time.monotonic())
        answer = await self.act(prepared, take)  # type: ignore[misc]
        return answer or Answer(3, 2)

    async def __aenter__(self) -> FakeTarget:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


def load(times: Sequence[float]) -> list[LoadRequest]:
    return [LoadRequest(str(number), at, np.zeros(3, np.int32), 3, 2) for number, at in enumerate(times)]


async def two_tokens(number: int, take: Callable[[int], None]) -> None:
    take(1)
    take(1)


async def test_requests_are_sent_at_their_times_regardless_of_answers() -> None:
    async def slow(number: int, take: Callable[[int], None]) -> None:
        take(1)
        await asyncio.sleep(0.6)
        take(1)

    target = FakeTarget(slow)
    run = LoadRun(target, load([0.3, 0.0, 0.1, 0.2]))
    await run.run()
    assert [record.request_id for record in run.records] == ["1", "2", "3", "0"]
    for record in run.records:
        assert record.sent_s >= record.scheduled_s, "never early"
        assert record.message_tokens == (1, 1) and record.gaps_s[0] >= 0.59
    assert max(record.sent_s for record in run.records) < min(r.last_token_s for r in run.records), "an open loop"


async def test_unfinished_requests_are_abandoned_at_the_end() -> None:
    async def endless(number: int, take: Callable[[int], None]) -> None:
        take(1)
        await asyncio.sleep(60)

    target = FakeTarget(endless)
    run = LoadRun(target, load([0.0, 0.2, 50.0]), timeout_s=30, end_s=0.5)
    await asyncio.wait_for(run.run(), 20)
    assert sorted(record.request_id for record in run.records) == ["0", "1"], "requests due later are not sent"
    assert all(record.status is Status.TIMEOUT and record.output_tokens == 1 for record in run.records)


async def test_failures_are_recorded_and_the_run_continues() -> None:
    async def act(number: int, take: Callable[[int], None]) -> Answer | None:
        if number == 1:
            raise RequestFailed(Status.REFUSED, "the queue is full")
        take(1)
        if number == 2:
            await asyncio.sleep(60)
        if number == 3:
            raise RequestFailed(Status.FAILED, "broken")
        take(1)
        return None

    run = LoadRun(FakeTarget(act), load([0, 0, 0, 0]), timeout_s=0.3)
    await run.run()
    by_id = {record.request_id: record for record in run.records}
    assert [by_id[str(number)].status for number in range(4)] == [
        Status.OK, Status.REFUSED, Status.TIMEOUT, Status.FAILED,
    ]  # fmt: skip
    assert by_id["1"].error == "the queue is full" and by_id["1"].message_s == ()
    assert "abandoned by the client after 0.3 s" in by_id["2"].error
    assert by_id["3"].output_tokens == 1, "the tokens received before the failure"


async def test_a_blocked_client_reports_itself() -> None:
    async def hog(number: int, take: Callable[[int], None]) -> None:
        take(1)
        time.sleep(0.05)
        take(1)

    run = LoadRun(FakeTarget(hog), load([number * 0.01 for number in range(12)]))
    await run.run()
    assert run.loop_delays is not None and run.loop_delays.max_s > 0.03
    header = RunHeader("x", "fake", "m", "w", "a", "c", "cmd")
    summary = summarize(Run(header, run.records, loop_delays=run.loop_delays))
    assert "were sent" in summary.client.bottleneck and "event loop" in summary.client.bottleneck
    assert summary.ttft is not None and summary.ttft.max > 0.3, "waits in the client count"


@pytest.mark.parametrize(
    ("counts", "total", "expected"),
    [([1, 1, 2], 4, (1, 1, 2)), ([1, 1, 1], 6, (2, 2, 2)), ([1, 1, 1], 4, (1, 1, 2)), ([], 0, ()), ([1, 1], 1, (0, 1))],
)
def test_tokens_of_messages_add_up_to_the_servers_total(
    counts: list[int], total: int, expected: tuple[int, ...]
) -> None:
    assert counted(counts, total) == expected


async def test_a_measured_run_has_its_facts() -> None:
    async def act(number: int, take: Callable[[int], None]) -> Answer:
        take(1)
        return Answer(5, 3, cached_tokens=2, drafted_tokens=4, accepted_tokens=1)

    workload = Workload("w", "all at once", None, tuple(load([0, 0])), {"seed": 4}, ("said",))
    system = SystemUnderLoad("x", FakeTarget(act), "m", "a card", {"slots": 8})
    run = await measure(system, workload, command="roster bench", warmup=load([0.0]))
    header = run.header
    assert (header.system, header.target, header.card, header.warmup_requests) == ("x", "fake", "a card", 1)
    assert header.settings == {"seed": 4, "slots": 8} and header.notes == ["said"]
    assert header.token_counts == TokenCounts.SPREAD.value
    assert len(run.requests) == 2, "warm-up is not recorded"
    counts = [(request.cached_tokens, request.drafted_tokens, request.accepted_tokens) for request in run.requests]
    assert counts == [(2, 4, 1), (2, 4, 1)]


async def test_an_interrupted_run_keeps_what_has_ended() -> None:
    second_began = asyncio.Event()

    async def act(number: int, take: Callable[[int], None]) -> None:
        take(2)
        if number:
            second_began.set()
            await asyncio.sleep(60)

    workload = Workload("w", "as in the trace", None, tuple(load([0.0, 0.1])))
    task = asyncio.create_task(measure(SystemUnderLoad("x", FakeTarget(act), "m", "c"), workload, command=""))
    await asyncio.wait_for(second_began.wait(), 30)
    task.cancel()
    run = await task
    assert [request.request_id for request in run.requests] == ["0"]
    assert run.header.notes == ["Interrupted: 1 of 2 requests had ended."]
