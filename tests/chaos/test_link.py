"""Stopped processes, a broken network, and messages lost, duplicated, reordered or truncated: every answer is right."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Delta
from roster_client.client.requests import OnDisconnect
from roster_client.serve.free_ports import free_ports
from runner_svc.backends.hash_backend import expected_tokens
from scheduler_svc.operation.service import FENCED
from tests.support.chaos import Load, settled
from tests.support.chaos_requests import EOS_PROBABILITY
from tests.support.link_proxies import FrameProxy, Meddler, TcpProxy, double, lose, reorder, truncate
from tests.support.processes import RosterProcesses

TEST_BACKEND = {"step_ms": 8, "eos_probability": EOS_PROBABILITY}
RUNNER = {
    "device": "hash", "slots": 16, "kv_tokens": 4096, "max_step_tokens": 256, "silence_s": 0.5,
    "test_backend": TEST_BACKEND,
}  # fmt: skip
SCHEDULER = {"flush_ms": 5, "runner_timeout_s": 1.5, "check": True}


def new_seed() -> int:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return seed


async def loaded(roster: RosterProcesses, count: int, seed: int, *steps: tuple[float, Any], first: int = 0) -> None:
    """Runs a load, with each step some seconds after the previous one; checks that no request was refused."""
    load = Load(roster, count, concurrency=24, seed=seed, first=first)
    running = asyncio.create_task(load.run())
    for wait_s, step in steps:
        await asyncio.sleep(wait_s)
        await asyncio.to_thread(step)
    outcome = await running
    assert outcome.completed + outcome.cancelled == count
    assert not outcome.refused


async def test_a_stopped_runner_is_given_up_and_taken_back(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, runners=2) as roster:
        pid = roster.pid("runner")
        await loaded(
            roster, 80, new_seed(),
            (0.5, lambda: os.kill(pid, signal.SIGSTOP)), (2.5, lambda: os.kill(pid, signal.SIGCONT)),
        )  # fmt: skip
        await settled(roster, 2)
        assert "silent for" in roster.logs()


async def test_a_stopped_scheduler_gives_up_no_runner(tmp_path: Path) -> None:
    """Once resumed, it restarts its timers and continues the same sessions."""
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER) as roster:
        pid = roster.pid("scheduler")
        await loaded(
            roster, 50, new_seed(),
            (0.5, lambda: os.kill(pid, signal.SIGSTOP)), (2.5, lambda: os.kill(pid, signal.SIGCONT)),
        )  # fmt: skip
        await settled(roster, 1)
        assert "a runner is lost" not in roster.logs()


@pytest.mark.parametrize("how", ["cut", "freeze"])
async def test_the_network_fails_and_comes_back(tmp_path: Path, how: str) -> None:
    (port,) = free_ports(1)
    with TcpProxy(port) as proxy:
        scheduler = {**SCHEDULER, "link": f"tcp://127.0.0.1:{port}"}
        runner = {**RUNNER, "link": proxy.endpoint}
        with RosterProcesses(tmp_path, scheduler=scheduler, runner=runner) as roster:
            fail = proxy.cut if how == "cut" else proxy.freeze
            await loaded(roster, 50, new_seed(), (0.4, fail), (2.0, proxy.heal), (0.5, fail), (0.3, proxy.heal))
            await settled(roster, 1)


@pytest.mark.parametrize("meddle", [lose, double, reorder, truncate])
async def test_messages_go_wrong(tmp_path: Path, meddle: Meddler) -> None:
    (port,) = free_ports(1)
    seed = new_seed()
    with FrameProxy(f"tcp://127.0.0.1:{port}", meddle, seed) as proxy:
        scheduler = {**SCHEDULER, "link": f"tcp://127.0.0.1:{port}", "runner_timeout_s": 5, "plan_timeout_s": 20}
        runner = {**RUNNER, "link": proxy.endpoint, "test_backend": {**TEST_BACKEND, "step_ms": 2}}
        with RosterProcesses(tmp_path, scheduler=scheduler, runner=runner) as roster:
            for first in range(0, 320, 40):  # few messages may go wrong in one load
                await loaded(roster, 40, seed, first=first)
                if proxy.meddled > 2:
                    break
            await settled(roster, 1)
        assert proxy.meddled > 2


async def test_a_scheduler_that_wakes_after_its_successor_took_over_is_fenced(tmp_path: Path) -> None:
    """The successor continues the sequences, and the client attaches there; the old one exits with status FENCED."""
    ports = free_ports(2)
    prompt, tokens = [4, 5, 6], 500
    expected = expected_tokens(prompt, tokens)
    with TcpProxy(ports[0]) as proxy:
        settings = [{**SCHEDULER, "link": f"tcp://127.0.0.1:{port}"} for port in ports]
        runner = {**RUNNER, "link": proxy.endpoint}
        (tmp_path / "successor").mkdir()
        successor = RosterProcesses(tmp_path / "successor", scheduler=settings[1])
        with RosterProcesses(tmp_path, scheduler=settings[0], runner=runner) as roster:
            try:
                async with RosterClient(roster.address) as client, RosterClient(successor.address) as other:
                    stream = client.generate(
                        prompt, request_id="moved", max_tokens=tokens, ignore_eos=True, temperature=0.0,
                        on_disconnect=OnDisconnect.KEEP,
                    )  # fmt: skip
                    received: list[int] = []
                    async for event in stream:
                        if isinstance(event, Delta):
                            received += event.token_ids
                        if len(received) > 20:
                            break
                    os.kill(roster.pid("scheduler"), signal.SIGSTOP)
                    successor.start_one("scheduler")
                    proxy.retarget(ports[1])
                    await asyncio.to_thread(successor.wait_ready)
                    rest = await other.attach("moved", [len(received)]).completion()
                    assert received + rest.choices[0].token_ids == expected
                    os.kill(roster.pid("scheduler"), signal.SIGCONT)
                    proxy.retarget(ports[0])  # the runner reconnects to its old scheduler and reports the newer term
                    assert await asyncio.to_thread(roster.wait, "scheduler") == FENCED
                    begin = time.monotonic()
                    proxy.retarget(ports[1])
                    await settled(successor, 1)
                    print(f"back at its successor within {time.monotonic() - begin:.1f} s")
            finally:
                successor.stop()
