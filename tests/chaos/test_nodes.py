"""Ranks of a group on two nodes: ranks, launchers and whole nodes are killed or stopped, and every answer is exact.

    ROSTER_TEST_FULL=1 ROSTER_CHAOS_RANKS=4 pytest tests/chaos/test_nodes.py

The nodes are two commands on this machine with folders of their own; they share no memory, only an address.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roster_client.serve.free_ports import free_ports
from tests.support.chaos import Load, settled
from tests.support.chaos_requests import EOS_PROBABILITY
from tests.support.processes import RosterProcesses
from tests.support.rank_log import RankLog
from tests.support.thoroughness import FULL

NUM_REQUESTS = int(os.environ.get("ROSTER_TEST_REQUESTS", 400))
NUM_EVENTS = int(os.environ.get("ROSTER_TEST_EVENTS", 14))
RANKS = int(os.environ.get("ROSTER_CHAOS_RANKS", 2))
SEED = int(os.environ.get("ROSTER_CHAOS_SEED", random.randrange(1 << 32)))
RUNNER = {
    "device": "hash", "tensor_parallel": RANKS, "nnodes": 2, "rank_timeout_s": 2, "slots": 16, "kv_tokens": 2048,
    "max_step_tokens": 512, "silence_s": 1.0, "host_kv_tokens": 1024,
    "test_backend": {
        "step_ms": 25, "eos_probability": EOS_PROBABILITY, "draft_wrong": 0.25, "copy_delay_ms": 10, "copy_lost": 0.1,
    },
}  # fmt: skip
SCHEDULER = {"retention_s": 5, "attach_s": 5, "flush_ms": 5, "runner_timeout_s": 10, "no_runner_s": 240}
NAMES = ("runner", "runner-2")
START_S = 120.0


class Nodes:
    """The processes of both nodes."""

    def __init__(self, roster: RosterProcesses, folder: Path, rng: random.Random) -> None:
        self.roster, self.rng = roster, rng
        self.logs = [RankLog(folder / f"{name}.log") for name in NAMES]

    def ranks(self) -> dict[int, int]:
        """Returns the process of each rank."""
        return {**self.logs[0].pids(), **self.logs[1].pids()}

    def on(self, node: int) -> list[int]:
        """Returns the ranks of a node."""
        return [rank for rank in range(RANKS) if rank // (RANKS // 2) == node]

    def loads(self) -> int:
        """Returns how often a rank has loaded."""
        return sum(len(log.lines("a rank has loaded")) for log in self.logs)

    # ------------------------------------------------------------------ events; each returns the ranks it ended

    async def kill_rank(self, node: int) -> list[int]:
        rank = self.rng.choice(self.on(node))
        os.kill(self.ranks()[rank], signal.SIGKILL)
        return [rank]

    async def stop_rank(self, node: int) -> list[int]:
        rank = self.rng.choice(self.on(node))
        os.kill(self.ranks()[rank], signal.SIGSTOP)
        return [rank]

    async def kill_launcher(self, node: int) -> list[int]:
        self.roster.end(NAMES[node], signal.SIGKILL)
        await asyncio.sleep(self.rng.uniform(0, 1))
        self.roster.start_one(NAMES[node])
        return self.on(node)

    async def stop_launcher(self, node: int) -> list[int]:
        return await self._pause(node, [self.roster.pid(NAMES[node])])

    async def stop_node(self, node: int) -> list[int]:
        pids = self.ranks()
        return await self._pause(node, [self.roster.pid(NAMES[node]), *(pids[rank] for rank in self.on(node))])

    async def _pause(self, node: int, pids: list[int]) -> list[int]:
        told, log = ("a node is lost", self.logs[0]) if node else ("node 0 is lost", self.logs[1])
        before = len(log.lines(told))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: len(log.lines(told)) > before, told)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        return []


async def until(come_true: Callable[[], bool], told: str) -> None:
    deadline = time.monotonic() + START_S
    while not come_true():
        assert time.monotonic() < deadline, f"it did not come true: {told}"
        await asyncio.sleep(0.03)


@pytest.mark.skipif(not FULL, reason="starts several processes: ROSTER_TEST_FULL=1 runs it")
@pytest.mark.timeout(3600)
async def test_every_answer_is_as_if_no_node_had_been_lost(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    (port,) = free_ports(1)
    runner = {**RUNNER, "rdzv_endpoint": f"127.0.0.1:{port}", "cache_dir": tmp_path / "node-0"}
    roster = RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=runner, runners=2, ready_s=START_S)
    roster.change("runner-2", node_rank=1, cache_dir=tmp_path / "node-1")
    with roster:
        nodes, events = Nodes(roster, tmp_path, random.Random(SEED)), list[str]()
        load = Load(
            roster,
            NUM_REQUESTS,
            concurrency=12,
            seed=SEED,
            may_begin=lambda number: number * NUM_EVENTS < (len(events) + 1) * NUM_REQUESTS,
        )
        async with asyncio.TaskGroup() as tasks:  # ends the load if a survivor is lost
            tasks.create_task(lose_nodes(nodes, events))
            loading = tasks.create_task(load.run())
        outcome = loading.result()
        await settled(roster, 1)
    print(events, f"{outcome.completed} completed, {outcome.cancelled} cancelled, {len(outcome.refused)} refused")
    assert outcome.completed + outcome.cancelled + len(outcome.refused) == NUM_REQUESTS
    assert len(outcome.refused) <= 1, outcome.refused
    assert len(events) == NUM_EVENTS


async def lose_nodes(nodes: Nodes, events: list[str]) -> None:
    """Causes NUM_EVENTS events, of each kind on each node in turn, each after the group has formed again."""
    kinds = [nodes.kill_rank, nodes.stop_rank, nodes.kill_launcher, nodes.stop_launcher, nodes.stop_node]
    order = [(kind, node) for kind in kinds for node in (0, 1)]
    nodes.rng.shuffle(order)
    await until(lambda: bool(nodes.logs[0].lines("ready")), "the first forming")
    while len(events) < NUM_EVENTS:
        kind, node = order[len(events) % len(order)]
        await asyncio.sleep(nodes.rng.uniform(0, 2))
        before, formed, loads = nodes.ranks(), len(nodes.logs[0].lines("ready")), nodes.loads()
        told = f"{kind.__name__} of node {node}"
        ended = await kind(node)
        await until(lambda: len(nodes.logs[0].lines("ready")) > formed, told)  # noqa: B023
        await until(lambda: nodes.loads() == loads + len(ended), told)  # noqa: B023
        after = nodes.ranks()
        assert {rank for rank in after if after[rank] != before[rank]} == set(ended), f"{told}: survivors stay"
        events.append(told)
