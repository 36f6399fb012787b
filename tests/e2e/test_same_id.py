"""Two runners on one host: by default each has an id of its own; of two that are given one, the first stays."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

from roster_client.client import RosterClient
from runner_svc.hash_model import expected_tokens
from tests.support.chaos import settled
from tests.support.processes import RosterProcesses

RUNNER = {"device": "hash", "slots": 4, "kv_tokens": 8192, "step_ms": 5, "eos_probability": 0}
SCHEDULER = {"check": True}


def another(folder: Path, roster: RosterProcesses) -> RosterProcesses:
    """For a second runner of the same settings; it starts nothing."""
    (folder / "another").mkdir()
    return RosterProcesses(folder / "another", runner=roster.settings("runner"))


async def check(client: RosterClient, prompt: list[int]) -> None:
    completion = await client.generate(prompt, max_tokens=200, ignore_eos=True, temperature=0.0).completion()
    assert completion.choices[0].token_ids == expected_tokens(prompt, 200, eos_probability=0)


async def test_a_second_runner_of_one_id_leaves_and_disturbs_nothing(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER) as roster:
        twin = another(tmp_path, roster)
        async with RosterClient(roster.address) as client:
            streams = [asyncio.create_task(check(client, [number])) for number in range(12)]
            twin.start_one("runner")
            assert await asyncio.to_thread(twin.wait, "runner") == 1
            await asyncio.gather(*streams)
            for logs in (twin.logs(), roster.logs()):
                assert "another runner is here as 'runner'" in logs and "--runner-id" in logs
            assert "a runner is lost" not in roster.logs()
            roster.end("runner", signal.SIGKILL)
            roster.start_one("runner")  # its successor, whose id nothing answers for
            await check(client, [99])
        await settled(roster, 1)


async def test_by_default_each_has_its_own(tmp_path: Path) -> None:
    own = {**RUNNER, "runner_id": "none", "cache_dir": tmp_path / "cache"}
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=own) as roster:
        other = another(tmp_path, roster)
        other.start_one("runner")
        try:
            status = await settled(roster, 2)
            host = socket.gethostname()
            assert sorted(runner.id for runner in status.runners) == [host, f"{host}-2"]
        finally:
            other.stop()
