"""A soak at twice the capacity, and a flood of a hundred times: memory, descriptors, threads and blocks stay flat.

    ROSTER_SOAK_S=900 ROSTER_SOAK_RESULT=bench/results/DATE-cpu-soak.json pytest tests/chaos/test_soak.py

soaks for a quarter of an hour and writes the resources used, quarter by quarter; the default is short.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, astuple
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.common.provenance import provenance, write_results
from roster_client.client import RosterClient
from roster_client.client.errors import NotFoundError, OverloadedError, RequestCancelledError
from roster_client.client.events import Completion, Delta, FinishReason
from roster_client.client.requests import Message, OnDisconnect
from scheduler_svc.front.request.preparation import THREADS
from tests.support.idle import wait_idle_at
from tests.support.process_watch import Usage, growth, quarters, usage
from tests.support.processes import RosterProcesses, roster_processes
from tests.support.thoroughness import count

SOAK_S = float(os.environ.get("ROSTER_SOAK_S", "12"))
RESULT = os.environ.get("ROSTER_SOAK_RESULT")
SEED = int(os.environ.get("ROSTER_SOAK_SEED", random.randrange(1 << 32)))
SLOTS, STEP_MS, WAITING = 8, 10, count(64, in_ci=16)
MEAN_TOKENS = 20
CAPACITY = SLOTS * 1000 / STEP_MS / MEAN_TOKENS
"""Requests per second if the machine keeps up; on a slower machine, the load exceeds twice its capacity."""
MEMORY_SLACK = 6 << 20
"""Bytes by which a process tree may grow.

Prompts repeat, since the tokenizer caches up to 10,000 words per thread and would still be growing otherwise. Garbage
that only a collection finds makes a sawtooth of about 4 MB.
"""
ROUNDS = 8
LEAK_SLACK = 3 << 20
"""Bytes by which the lowest level of the last rounds may exceed that of the first.

Between them are 50 times as many requests as the machine holds, so that a leak of 1 KB per refusal shows.
"""
SAMPLES = max(40, int(SOAK_S / 5))


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    scheduler = {
        "max_waiting_requests": WAITING, "retention_s": 1, "front_workers": 1,
        "tenant_limits": '{"capped": {"running": 2, "waiting": 16}, "heavy": {"weight": 2}}',
    }  # fmt: skip
    runner = {
        "device": "hash",
        "slots": SLOTS,
        "kv_tokens": 4096,
        "test_backend": {"step_ms": STEP_MS, "eos_probability": 0},
    }
    with roster_processes(tmp_path_factory.mktemp("soak"), scheduler=scheduler, runner=runner) as processes:
        processes.wait_for_mask_processes()
        yield processes


@asynccontextmanager
async def always_ready(client: RosterClient) -> AsyncIterator[None]:
    """Watches readiness inside the block, and checks that it is always SERVING."""
    stub = health_pb2_grpc.HealthStub(client.channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(service="roster.v1.InferenceService"))
    seen: list[int] = []

    async def read() -> None:
        async for answer in call:
            seen.append(answer.status)

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert seen and set(seen) == {health_pb2.HealthCheckResponse.SERVING}, seen


class Load:
    """Requests of all sorts, and their outcomes."""

    def __init__(self, clients: list[RosterClient], rng: random.Random) -> None:
        self._clients = clients
        self._rng = rng
        self.outcomes: Counter[str] = Counter()

    async def one(self, number: int) -> None:
        """Runs one request to whichever end it comes."""
        rng, client = self._rng, self._clients[number % len(self._clients)]
        tokens = rng.randrange(1, 2 * MEAN_TOKENS)
        prompt: str | list[Message] = "soak " * rng.randrange(1, 30)
        if number % 5 == 0:
            prompt = [Message("user", f"question {number % 50}")]
        way = rng.choice(("whole", "whole", "whole", "cut", "cancel", "deadline", "kept"))
        try:
            if way == "deadline":
                await client.generate(
                    prompt, raw=True, max_tokens=tokens, timeout_ms=rng.choice((30, 300))
                ).completion()
            elif way in ("cut", "kept"):
                keep = OnDisconnect.KEEP if way == "kept" else OnDisconnect.CANCEL
                async with client.generate(
                    prompt, raw=True, max_tokens=tokens, on_disconnect=keep, keep_ms=500
                ) as stream:
                    async for event in stream:
                        if isinstance(event, Delta):
                            break
            elif way == "cancel":
                await self._cancelled(client, prompt, tokens, f"soak-{number}")
            else:
                check(
                    await client.generate(prompt, raw=True, max_tokens=tokens, n=rng.choice((1, 1, 2))).completion(),
                    tokens,
                )
            self.outcomes[way] += 1
        except OverloadedError as error:
            assert error.retry_after_s is not None
            self.outcomes["refused"] += 1
        except RequestCancelledError:
            self.outcomes[way] += 1

    async def _cancelled(self, client: RosterClient, prompt: str | list[Message], tokens: int, identity: str) -> None:
        async with client.generate(prompt, raw=True, max_tokens=tokens, request_id=identity) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    with contextlib.suppress(NotFoundError):  # it has ended meanwhile
                        await client.cancel(identity)
                    break


def check(completion: Completion, tokens: int) -> None:
    """Checks that every choice of a complete answer has the requested number of tokens."""
    for choice in completion.choices:
        assert choice.finish is not None and choice.finish.reason is FinishReason.LENGTH
        assert len(choice.token_ids) == tokens


async def test_twice_the_capacity(roster: RosterProcesses) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    tenants = ("", "heavy", "capped", "other")
    clients = [RosterClient(roster.address, tenant=tenant) for tenant in tenants]
    load = Load(clients, rng)
    samples: dict[str, list[Usage]] = {"scheduler": [], "runner": []}
    tasks: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    began, number = loop.time(), 0
    next_sample = began
    async with always_ready(clients[0]):
        while loop.time() - began < SOAK_S:
            task = asyncio.create_task(load.one(number))
            tasks.add(task)
            number += 1
            if loop.time() >= next_sample:
                next_sample += SOAK_S / SAMPLES
                for name, found in samples.items():
                    found.append(usage(roster.pid(name)))
            await asyncio.sleep(rng.expovariate(2 * CAPACITY))
            for done in [task for task in tasks if task.done()]:
                tasks.discard(done)
                done.result()
        await asyncio.gather(*tasks)
    status = await wait_idle_at(roster.admin_address)
    for client in clients:
        await client.close()
    grown = {name: growth(found) for name, found in samples.items()}
    print(f"{number} requests: {dict(load.outcomes)}; growth {grown}; {status.totals}")
    assert sum(load.outcomes.values()) == number
    assert load.outcomes["whole"] > 10 and load.outcomes["refused"] > number / 20
    for name, used in grown.items():
        assert used.memory_bytes < MEMORY_SLACK, f"{name} grew: {used}"
        # A thread pool adds a thread when all its threads are busy, possibly late.
        assert used.descriptors <= 12 and used.threads <= THREADS and used.processes == 0, f"{name} grew: {used}"
    if RESULT:
        report(number, load.outcomes, samples)


def report(requests: int, outcomes: Counter[str], samples: dict[str, list[Usage]]) -> None:
    result = {
        "seconds": SOAK_S,
        "requests": requests,
        "outcomes": dict(outcomes),
        "blocks_held_afterwards": 0,  # otherwise waiting for idleness would have failed
        "bound_on_growth_bytes": MEMORY_SLACK,
        "medians_by_quarter": {name: [asdict(usage) for usage in quarters(found)] for name, found in samples.items()},
        "growth": {name: asdict(growth(found)) for name, found in samples.items()},
    }
    source = provenance("pytest", ("grpcio", "pyzmq", "protobuf", "uvloop"))
    write_results(Path(str(RESULT)), source, result)


async def test_a_hundred_times_the_capacity(roster: RosterProcesses) -> None:
    """Every request is answered at once, and a refused one leaves nothing behind.

    A single burst's residue depends on when garbage was last collected; the residue of refusals adds up over the
    rounds.
    """
    flood = 100 * (SLOTS + WAITING)
    outcomes: Counter[str] = Counter()
    levels: list[Usage] = []
    async with RosterClient(roster.address) as client, always_ready(client):
        await burst(client, flood, outcomes)  # warms up: buffers grow to their final size
        for _ in range(ROUNDS):
            await burst(client, flood // ROUNDS, outcomes)
            await wait_idle_at(roster.admin_address)
            levels.append(usage(roster.pid("scheduler")))
    early, late = lowest(levels[: ROUNDS // 2]), lowest(levels[ROUNDS // 2 :])
    print(dict(outcomes), levels)
    assert outcomes["refused"] > flood * 0.8 and outcomes["served"] > SLOTS
    assert late.memory_bytes - early.memory_bytes < LEAK_SLACK
    assert late.descriptors <= early.descriptors + 4 and late.threads <= early.threads + 1


def lowest(levels: list[Usage]) -> Usage:
    """Returns the minimum of each resource, which excludes garbage that awaits a collection."""
    return Usage(*map(min, zip(*map(astuple, levels), strict=True)))


async def burst(client: RosterClient, count: int, outcomes: Counter[str]) -> None:
    """Sends `count` requests at once over one session."""
    async with client.session() as session:

        async def one(number: int) -> None:
            try:
                await session.generate(f"flood {number % 50}", raw=True, max_tokens=5).completion()
                outcomes["served"] += 1
            except OverloadedError:
                outcomes["refused"] += 1

        await asyncio.gather(*(one(number) for number in range(count)))
