"""Streams cut at any point leave the service's pool, queue and memory as they were."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from roster_client.client import RosterClient
from roster_client.client.errors import NotFoundError
from roster_client.client.events import Delta, Finish, FinishReason
from tests.support.processes import RosterProcesses, roster_processes
from tests.support.thoroughness import count

STREAMS = int(os.environ.get("E2E_CANCELLED_STREAMS", count(500, in_ci=240)))
AT_ONCE = 32
ROUNDS = 4
MEMORY_SLACK = 12 << 20


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    runner = {
        "device": "hash",
        "slots": 8,
        "kv_tokens": 4096,
        "max_step_tokens": 64,
        "test_backend": {"eos_probability": 0},
    }
    # No retention: finished requests kept for Attach would distort the memory measured here.
    scheduler = {"check": True, "retention_s": 0, "flush_ms": 0}
    with roster_processes(tmp_path_factory.mktemp("cancel"), scheduler=scheduler, runner=runner) as processes:
        processes.wait_for_mask_processes()
        yield processes


async def cut_one(client: RosterClient, rng: random.Random, number: int) -> None:
    """Starts an endless stream and ends it after 0 to 20 deltas, in one of three ways."""
    deltas, way = rng.randrange(21), rng.choice(["cut", "cancel", "task"])
    prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
    stream = client.generate(prompt, request_id=f"r{number}", ignore_eos=True, max_tokens=2000, n=rng.choice([1, 1, 2]))
    if way == "task":
        await cut_by_task(stream, deltas)
        return
    seen = 0
    cancelled = False
    async with stream:
        if deltas == 0 and way == "cut":
            return  # possibly before the server has received it
        async for event in stream:
            seen += isinstance(event, Delta)
            if isinstance(event, Finish):
                assert event.reason is FinishReason.CANCELLED and cancelled
            if seen >= deltas and not cancelled:
                if way == "cut":
                    return
                cancelled = True
                await client.cancel(f"r{number}")
    assert cancelled, "an endless stream ended by itself"


async def cut_by_task(stream: Any, deltas: int) -> None:
    enough = asyncio.Event()

    async def read() -> None:
        seen = 0
        async for event in stream:
            seen += isinstance(event, Delta)
            if seen >= deltas:
                enough.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(enough.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cut_many(client: RosterClient, rng: random.Random, numbers: range) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            await cut_one(client, rng, number)

    await asyncio.gather(*[one(number) for number in numbers])


async def test_cut_streams_leave_nothing_behind(roster: RosterProcesses, wait_idle: Any) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with RosterClient(roster.address) as client:
        await cut_many(client, rng, range(100))  # allocators and caches reach their final size
        await wait_idle(roster.admin_address)
        levels: dict[str, list[int]] = {"scheduler": [], "runner": []}
        for number in range(ROUNDS):
            first = 100 + number * STREAMS // ROUNDS
            await cut_many(client, rng, range(first, first + STREAMS // ROUNDS))
            status = await wait_idle(roster.admin_address)
            for name, found in levels.items():
                found.append(roster.memory_bytes(name))
        assert status.totals.finished >= STREAMS // ROUNDS * ROUNDS
        print(f"bytes {levels}")
        for name, found in levels.items():  # the minimum of each half excludes garbage that awaits a collection
            assert min(found[ROUNDS // 2 :]) - min(found[: ROUNDS // 2]) < MEMORY_SLACK, (name, found)
        # The service still works.
        completion = await client.generate([1, 2, 3], max_tokens=5, ignore_eos=True).completion()
        assert len(completion.choices[0].token_ids) == 5
        with pytest.raises(NotFoundError):
            await client.cancel("r101")


async def test_a_queued_request_can_be_cancelled(roster: RosterProcesses, wait_idle: Any) -> None:
    async with RosterClient(roster.address) as client:
        running = [client.generate([1], ignore_eos=True, max_tokens=400, request_id=f"run{i}") for i in range(8)]
        for stream in running:
            await anext(aiter(stream))
        queued = client.generate([2], ignore_eos=True, max_tokens=400, request_id="queued")
        reading = asyncio.create_task(queued.completion())
        await asyncio.sleep(0.1)
        await client.cancel("queued")
        completion = await asyncio.wait_for(reading, 10)
        finish = completion.choices[0].finish
        assert finish is not None and finish.reason is FinishReason.CANCELLED
        for stream in running:
            stream.cancel()
    await wait_idle(roster.admin_address)


async def test_deadlines_end_waiting_and_running_requests(roster: RosterProcesses, wait_idle: Any) -> None:
    async with RosterClient(roster.address) as client:
        streams = [client.generate([i], ignore_eos=True, max_tokens=4000, timeout_ms=1000) for i in range(8)]
        # The calls' deadlines: of running requests, and of some that wait for a slot.
        streams += [client.generate([i], ignore_eos=True, max_tokens=4000, deadline_s=1.0) for i in range(8)]
        completions = await asyncio.gather(*[stream.completion() for stream in streams])
    assert all(len(one.choices[0].token_ids) == one.choices[0].finish.num_tokens for one in completions)
    reasons = {completion.choices[0].finish.reason for completion in completions if completion.choices[0].finish}
    assert reasons == {FinishReason.DEADLINE}
    await wait_idle(roster.admin_address)
