"""Whom a scheduler takes: each runner of a host by its own id, of two of one id the first, and none that is unlike."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

from roster_client.client import RosterClient
from runner_svc.hash_model import expected_tokens
from tests.support.chaos import settled
from tests.support.processes import RosterProcesses

HOST = socket.gethostname()
RUNNER = {"device": "hash", "slots": 4, "kv_tokens": 8192, "step_ms": 5, "eos_probability": 0}
SCHEDULER = {"check": True}


def another(folder: Path, roster: RosterProcesses, **settings: object) -> RosterProcesses:
    """For one more runner, of the same settings but for these; it starts nothing."""
    folder.mkdir()
    return RosterProcesses(folder, runner={**roster.settings("runner"), **settings})


async def check(client: RosterClient, prompt: list[int]) -> None:
    """The answer is the solo one."""
    completion = await client.generate(prompt, max_tokens=200, ignore_eos=True, temperature=0.0).completion()
    assert completion.choices[0].token_ids == expected_tokens(prompt, 200, eos_probability=0)


async def test_who_may_join(tmp_path: Path) -> None:
    """`none` as an id is the default one."""
    runner = {**RUNNER, "runner_id": "none", "cache_dir": tmp_path / "cache"}
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=runner) as roster:
        second = another(tmp_path / "second", roster)
        twin = another(tmp_path / "twin", roster, runner_id=HOST)
        unlike = another(tmp_path / "unlike", roster, vocab_size=300)
        try:
            second.start_one("runner")
            status = await settled(roster, 2)
            assert sorted(one.id for one in status.runners) == [HOST, f"{HOST}-2"]
            async with RosterClient(roster.address) as client:
                streams = [asyncio.create_task(check(client, [number])) for number in range(12)]
                for refused, reason in ((twin, f"another runner is here as '{HOST}'"), (unlike, "has 300 tokens")):
                    refused.start_one("runner")
                    assert await asyncio.to_thread(refused.wait, "runner") == 1
                    for logs in (refused.logs(), roster.logs()):
                        assert reason in logs
                assert "--runner-id" in twin.logs() and "--runner-id" in roster.logs()
                await asyncio.gather(*streams)
                assert "a runner is lost" not in roster.logs()
                roster.end("runner", signal.SIGKILL)
                roster.start_one("runner")
                await check(client, [99])
            status = await settled(roster, 2)
            assert sorted(one.id for one in status.runners) == [HOST, f"{HOST}-2"], "a restart keeps its id"
        finally:
            second.stop()
