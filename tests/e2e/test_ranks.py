"""A runner of several ranks beside another runner: it drains, is poisoned, reports its health and forms again."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil
import pytest

from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.errors import RosterError
from roster_client.client.events import Completion, FinishReason
from roster_client.client.health import check_health
from roster_client.serve.free_ports import free_ports
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.chaos import settled
from tests.support.process_state import gone
from tests.support.processes import RosterProcesses
from tests.support.rank_log import RankLog
from tests.support.thoroughness import choice

TOKENS = 150
POISON = 201
START_S = 90.0
SCHEDULER = {"flush_ms": 5, "check": True, "no_runner_s": START_S}
RUNNER = {
    "device": "hash", "slots": 8, "kv_tokens": 4096, "silence_s": 0.5, "tensor_parallel": 2, "rank_timeout_s": 2,
    "test_backend": {"step_ms": 5, "eos_probability": 0},
}  # fmt: skip


def prompts(count: int, seed: int = 1, avoid: int = POISON) -> list[list[int]]:
    """Returns prompts whose greedy answers don't have the token `avoid`."""
    rng, found = random.Random(seed), list[list[int]]()
    while len(found) < count:
        prompt = [rng.randrange(200) for _ in range(rng.randrange(1, 24))]
        if avoid not in expected_tokens(prompt, TOKENS, eos_probability=0):
            found.append(prompt)
    return found


async def answers(client: RosterClient, given: Sequence[list[int]]) -> list[Completion | BaseException]:
    """Returns the completions, or errors, of greedy requests sent at once."""
    streams = [client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0) for prompt in given]
    return await asyncio.gather(*[stream.completion() for stream in streams], return_exceptions=True)


def assert_right(given: Sequence[list[int]], completions: Sequence[Completion | BaseException]) -> None:
    for prompt, completion in zip(given, completions, strict=True):
        assert isinstance(completion, Completion), completion
        assert completion.choices[0].token_ids == expected_tokens(prompt, TOKENS, eos_probability=0)
        finish = completion.choices[0].finish
        assert finish is not None and finish.reason is FinishReason.LENGTH


async def test_a_group_drains_while_a_single_runner_goes_on(tmp_path: Path) -> None:
    given = prompts(12)
    roster = RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, runners=2, ready_s=START_S)
    roster.change("runner-2", tensor_parallel=1)
    with roster:
        log = RankLog(tmp_path / "runner.log")
        log.await_epoch(1, START_S)
        await settled(roster, 2)
        ranks = log.pids()
        launcher = psutil.Process(roster.pid("runner"))
        children = launcher.children()
        assert set(ranks.values()) <= {child.pid for child in children}, "it hears of their ends itself"
        forking = [child for child in children if child.pid not in ranks.values()]
        assert forking and all(child.num_threads() == 1 for child in forking), "what is forked has no threads"
        async with RosterClient(roster.address) as client:
            answering = asyncio.create_task(answers(client, given))
            await asyncio.sleep(0.2)
            os.kill(ranks[1], signal.SIGTERM)  # it ends with rank 0, and not before
            await asyncio.sleep(0.1)
            assert log.pids() == ranks and not log.lines("a rank is lost, and starts again")
            assert not gone(ranks[1])
            roster.send("runner", signal.SIGTERM)
            assert_right(given, await answering)
        assert roster.wait("runner") == 0
        assert all(map(gone, ranks.values()))
        await settled(roster, 1)
    assert "ranks=2" in (tmp_path / "scheduler.log").read_text(), "the log names the ranks of a runner that joins"


@pytest.mark.parametrize("effect", choice(["kill", "error"], in_ci=["error"]))
async def test_only_the_request_that_ends_ranks_is_refused(tmp_path: Path, effect: str) -> None:
    innocent, guilty = prompts(5), [1, POISON, 2]
    poisoned = {**RUNNER["test_backend"], "poison_token": POISON, "poison": effect}  # type: ignore[dict-item]
    runner = {**RUNNER, "test_backend": poisoned}
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=runner, ready_s=START_S) as roster:
        pid = roster.pid("runner")
        async with RosterClient(roster.address) as client, asyncio.timeout(300):
            answering = asyncio.create_task(answers(client, innocent[:3]))
            await asyncio.sleep(0.1)
            poisoning = asyncio.create_task(answers(client, [guilty]))
            assert_right(innocent[3:], await answers(client, innocent[3:]))
            assert_right(innocent[:3], await answering)
            (refused,) = await poisoning
        assert isinstance(refused, RosterError) and refused.code is grpc.StatusCode.INTERNAL, refused
        await settled(roster, 1, within_s=START_S)
        assert roster.pid("runner") == pid and not roster.has_ended("runner"), "the launcher outlives its ranks"
        log = RankLog(tmp_path / "runner.log")
        assert len(set(log.pids().values())) == 2 and log.epoch >= 3
        if effect == "error":
            assert len(log.lines("started a rank")) == 2, "an error ends no process"


async def test_health_is_that_of_rank_0_and_is_back_after_it_was_lost(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    runner = {**RUNNER, "health_listen": address}
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=runner, ready_s=START_S) as roster:
        log = RankLog(tmp_path / "runner.log")
        for epoch in (1, 2):
            log.await_epoch(epoch, START_S)
            await healthy(address)
            os.kill(log.pids()[0], signal.SIGKILL)
        log.await_epoch(3, START_S)
        await healthy(address)
        given = prompts(2)
        async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
            assert_right(given, await answers(client, given))
            (group,) = (await admin.get_status(deadline_s=10)).groups.groups
    assert group.serves and group.ranks == 2 and group.epoch == 3
    assert re.fullmatch(r"rank 0 \(pid \d+\) was ended by signal 9", group.lost) and group.HasField("lost_s")


async def healthy(address: str) -> None:
    deadline = time.monotonic() + 20
    while not await asyncio.to_thread(serves, address):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def serves(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            return check_health(channel, 2.0, "roster.runner") == "SERVING"
        except RosterError:
            return False
