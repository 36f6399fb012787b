"""Two groups of two ranks on a local Ray of two nodes. Skipped without Ray, which the extra `ray` brings.

pip install 'ray>=2.60' && pytest tests/runner_svc/launch/test_ray_cluster.py
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from roster_client.client.admin import AdminClient
from roster_client.client.async_client import RosterClient
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.process_state import children_of
from tests.support.processes import RosterProcesses

pytest.importorskip("ray", reason="Ray is not installed (extra ray)")

from ray.cluster_utils import Cluster

PATIENCE_S = 180.0
TOKENS = 200
SCHEDULER = {"flush_ms": 5, "check": True, "no_runner_s": PATIENCE_S}
RUNNER = {
    "device": "hash", "launcher": "ray", "groups": 2, "tensor_parallel": 2, "slots": 4, "kv_tokens": 4096,
    "max_step_tokens": 64, "silence_s": 1.0, "test_backend": {"step_ms": 10, "eos_probability": 0},
}  # fmt: skip


def test_what_ray_pickles_is_a_name() -> None:
    from runner_svc.launch.ray_cluster import RunnerCommand

    assert len(pickle.dumps(RunnerCommand)) < 100


@pytest.mark.timeout(900)
async def test_groups_are_placed_and_lost_ones_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shutil.which("roster-runner"), "roster-runner is not in PATH"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=2)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        roster = RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, ready_s=PATIENCE_S, fresh=True)
        with roster:
            async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
                await lose_a_group_under_load(client, admin)
            assert roster.end("runner") == 0
            until_at = time.monotonic() + PATIENCE_S
            while commands() and time.monotonic() < until_at:
                await asyncio.sleep(0.1)
            assert not commands()
    finally:
        nodes.shutdown()


async def lose_a_group_under_load(client: RosterClient, admin: AdminClient) -> None:
    async def both_serve() -> bool:
        return len((await admin.get_status(deadline_s=10)).runners) == 2

    await until(both_serve)
    first = commands()
    assert sorted(first) == ["runner-0", "runner-1"]
    assert len({process.parent() for process in first.values()}) == 2
    answers = [asyncio.create_task(check(client, [number, 7, 9])) for number in range(8)]
    await asyncio.sleep(0.5)
    first["runner-0"].kill()

    async def is_back() -> bool:
        return commands().get("runner-0") not in (None, first["runner-0"]) and await both_serve()

    await until(is_back)
    assert commands()["runner-1"] == first["runner-1"]
    await asyncio.gather(*answers)
    await check(client, [1, 2, 3])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    until_at = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < until_at
        await asyncio.sleep(0.1)


async def check(client: RosterClient, prompt: list[int]) -> None:
    """Checks that the answer equals the solo answer."""
    completion = await client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0).completion()
    assert completion.choices[0].token_ids == expected_tokens(prompt, TOKENS, eos_probability=0)


def commands() -> dict[str, psutil.Process]:
    """Returns the groups' commands, by runner id; their forks, which have the same words, are left out."""
    found, all_forks = dict[str, psutil.Process](), set[int]()
    for process in psutil.process_iter(["cmdline", "ppid"]):  # by process id: parents come first
        words = process.info["cmdline"] or []
        ends = [place for place, word in enumerate(words) if word == "--runner-id"]
        if ends and "local" in words:
            if process.info["ppid"] not in all_forks and children_of(process):
                found[words[ends[-1] + 1]] = process
            all_forks.add(process.pid)
    return found
