"""A runner joins while streams run and takes load within a second; one is drained and its sequences move on."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_protos import admin_pb2
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.chaos import settled
from tests.support.processes import RosterProcesses

SLOTS = 4
TOKENS = 300
FULL_S = 5.0
"""The promise is a second and a tenth is usual; the limit allows for machines with busy cores."""
SCHEDULER = {"flush_ms": 5, "check": True}
RUNNER = {"device": "hash", "slots": SLOTS, "kv_tokens": 8192, "test_backend": {"step_ms": 10, "eos_probability": 0}}


async def check(client: RosterClient, prompt: list[int], tokens: int) -> None:
    """Checks that the answer equals the solo answer."""
    completion = await client.generate(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0).completion()
    assert completion.choices[0].token_ids == expected_tokens(prompt, tokens, eos_probability=0)


async def status_of(admin: AdminClient, runner: str) -> admin_pb2.RunnerStatus | None:
    """Returns the scheduler's status of the runner, or None if it is not connected."""
    status = await admin.get_status(deadline_s=10)
    return next((entry for entry in status.runners if entry.id == runner), None)


async def test_a_runner_joins_and_another_leaves_under_load(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, runners=2) as roster:
        assert roster.end("runner-2") == 0
        async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
            prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 30))] for _ in range(5 * SLOTS)]
            streams = [asyncio.create_task(check(client, prompt, TOKENS)) for prompt in prompts]
            while (only := await status_of(admin, "runner")) is None or only.running < SLOTS:
                await asyncio.sleep(0.02)
            roster.start_one("runner-2")
            seconds = await join(admin, "runner-2")
            print(f"from hello to a full batch: at most {seconds:.2f} s")
            assert roster.end("runner", signal.SIGTERM) == 0  # finishes its plans; its sequences continue elsewhere
            assert "a runner leaves" in roster.logs()
            while await status_of(admin, "runner") is not None:
                await asyncio.sleep(0.02)
            await asyncio.gather(*streams)
        await settled(roster, 1)
        # A runner that leaves is no crash: no request was suspected or lost.
        assert "a request is refused" not in roster.logs()


async def join(admin: AdminClient, runner: str) -> float:
    """Returns the most seconds that a new runner may have needed to fill its batch (the status is polled)."""
    absent_s = time.monotonic()
    while (entry := await status_of(admin, runner)) is None:
        absent_s = time.monotonic()
        await asyncio.sleep(0.02)
    while entry is None or entry.running < SLOTS:
        assert time.monotonic() - absent_s < FULL_S, entry
        entry = await status_of(admin, runner)
    return time.monotonic() - absent_s
