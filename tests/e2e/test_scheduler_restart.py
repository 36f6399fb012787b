"""The scheduler is killed under load: the runner keeps the sequences, and the clients' streams continue."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Completion, FinishReason
from roster_client.client.requests import Options
from roster_client.client.sync_client import SyncRosterClient
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.processes import RosterProcesses, roster_processes
from tests.support.thoroughness import choice

TOKENS = 400
STEP_MS = 5


@pytest.fixture(scope="module", params=choice([1, 2], in_ci=[1]), ids=lambda ranks: f"{ranks} ranks")
def roster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    runner = {
        "device": "hash", "slots": 8, "test_backend": {"step_ms": STEP_MS}, "silence_s": 1.0, "kv_tokens": 16384,
        "tensor_parallel": request.param,
    }  # fmt: skip
    scheduler = {"check": True, "flush_ms": 0, "retention_s": 30}
    with roster_processes(tmp_path_factory.mktemp("restart"), scheduler=scheduler, runner=runner) as processes:
        yield processes


def options(seed: int, n: int = 1, **more: Any) -> Options:
    return {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": seed, "n": n, **more}  # type: ignore[typeddict-item]


def assert_whole(completion: Completion, prompt: list[int], seed: int, n: int) -> None:
    for index in range(n):
        choice = completion.choices[index]
        expected = expected_tokens(prompt, TOKENS, temperature=1.0, seed=seed, sample_index=index)
        assert choice.token_ids == expected, choice.finish
        assert choice.text == bytes(token for token in expected if token < 256).decode("utf-8", "replace")
        assert choice.finish is not None and choice.finish.reason is FinishReason.LENGTH
        assert choice.finish.num_tokens == TOKENS


def restart(roster: RosterProcesses) -> None:
    roster.end("scheduler", signal.SIGKILL)
    roster.start_one("scheduler")
    roster.wait_ready()


async def test_streams_of_every_kind_go_on(roster: RosterProcesses, wait_idle: Any) -> None:
    """More than the slots: clients send waiting requests again. One has stop strings, another logprobs."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    runner_pid = roster.pid("runner")
    async with RosterClient(roster.address) as client, client.session() as session:
        waiting = []
        for number in range(12):
            prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
            n = 3 if number % 6 == 5 else 1
            start = session.generate if number % 2 else client.generate
            stream = start(prompt, **options(number, n))
            waiting.append(asyncio.create_task(_check(stream, prompt, number, n)))
        scored = asyncio.create_task(client.generate([1, 2], **options(99, logprobs=2)).completion())
        synchronous = threading.Thread(target=_synchronously, args=(roster.address, [7, 7], failures := []))
        synchronous.start()
        await asyncio.sleep(0.8)
        for _ in range(2):
            await asyncio.to_thread(restart, roster)
            await asyncio.sleep(0.8)
        await asyncio.gather(*waiting)
        completion = await scored
        assert_whole(completion, [1, 2], 99, 1)
        assert len(completion.choices[0].logprobs) == TOKENS
        await asyncio.to_thread(synchronous.join)
        assert not failures
    assert roster.pid("runner") == runner_pid, "the runner must not restart"
    status = await wait_idle(roster.admin_address)
    assert status.runners[0].running == 0


async def _check(stream: Any, prompt: list[int], seed: int, n: int) -> None:
    assert_whole(await stream.completion(), prompt, seed, n)


def _synchronously(address: str, prompt: list[int], failures: list[BaseException]) -> None:
    try:
        with SyncRosterClient(address) as client:
            assert_whole(client.generate(prompt, **options(5)).completion(), prompt, 5, 1)
    except BaseException as error:
        failures.append(error)


async def test_a_stop_string_across_the_restart(roster: RosterProcesses) -> None:
    """The text is rebuilt from the tokens: a string that begins before the cursor and ends after it is found."""
    prompt, seed = [3, 1, 4], 17
    tokens = expected_tokens(prompt, TOKENS, temperature=1.0, seed=seed)
    text = bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
    stop = text[len(text) * 3 // 4 :][:12]
    async with RosterClient(roster.address) as client:
        stream = client.generate(prompt, **options(seed, stop=[stop]))
        completing = asyncio.create_task(stream.completion())
        await asyncio.sleep(0.5)
        await asyncio.to_thread(restart, roster)
        completion = await completing
    assert completion.text == text[: text.index(stop)]
    finish = completion.choices[0].finish
    assert finish is not None and finish.stop_string == stop


async def test_the_new_scheduler_goes_on_at_once(roster: RosterProcesses) -> None:
    """The log shows that the runner's sequences resumed without being recomputed."""
    async with RosterClient(roster.address) as client:
        stream = client.generate([1] * 30, **options(1))
        completing = asyncio.create_task(stream.completion())
        await asyncio.sleep(0.5)
        await asyncio.to_thread(restart, roster)
        assert_whole(await completing, [1] * 30, 1, 1)
    log = roster.logs()
    assert "a runner's sequences go on" in log
