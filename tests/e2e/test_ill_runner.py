"""One of two runners fails every plan: clients are unaffected, operators see it; once alone, readiness ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from runner_svc.backends.hash_backend import expected_tokens
from tests.e2e.test_health import Watches
from tests.e2e.test_poison import revive
from tests.support.metrics_scrape import scrape, value
from tests.support.processes import RosterProcesses
from tests.support.thoroughness import choice

ILL = "runner-2"
EVERYWHERE = 0
"""A token in every prompt here and in the scheduler's probe."""
TOKENS = 40
AT_ONCE = 16
"""As many as there are slots, so that the faulty runner is sent some."""
SCHEDULER = {"flush_ms": 5, "check": True}
RUNNER = {
    "device": "hash",
    "slots": 8,
    "kv_tokens": 4096,
    "test_backend": {"step_ms": 5, "eos_probability": 0},
    "silence_s": 0.5,
}


async def check(client: RosterClient, rng: random.Random) -> None:
    """Checks that the answer equals the solo answer."""
    prompt = [EVERYWHERE, *(rng.randrange(200) for _ in range(rng.randrange(20)))]
    completion = await client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, temperature=0.0).completion()
    assert completion.choices[0].token_ids == expected_tokens(prompt, TOKENS, eos_probability=0)


async def held_back(admin: AdminClient) -> list[str]:
    """Returns the runners that get no work."""
    return [runner.id for runner in (await admin.get_status(deadline_s=10)).held_back]


@pytest.mark.parametrize("effect", choice(["error", "kill", "broken"], in_ci=["error"]))
async def test_an_ill_runner_is_held_back_and_comes_back(tmp_path: Path, effect: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    roster = RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, runners=2)
    roster.change(ILL, test_backend={"poison_token": EVERYWHERE, "poison": effect})
    with roster:
        reviving = asyncio.create_task(revive(roster, Counter()))
        async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
            async with asyncio.timeout(120):
                while await held_back(admin) != [ILL]:
                    await asyncio.gather(*(check(client, rng) for _ in range(AT_ONCE)))
                families = scrape(roster.metrics_address)
                assert value(families, "roster_runner_losses_in_a_row", runner=ILL) >= 2
                assert value(families, "roster_runners") == 1 and value(families, "roster_runners_held_back") == 1
                await asyncio.to_thread(only_the_ill_one_is_left, roster)
                waiting = [asyncio.create_task(check(client, rng)) for _ in range(4)]
                reviving.cancel()
                roster.change(ILL, test_backend={"poison_token": None})
                await asyncio.to_thread(roster.end, ILL)
                assert not any(task.done() for task in waiting)
                roster.start_one(ILL)
                await asyncio.gather(*waiting)
                await asyncio.to_thread(is_ready_again, roster)
                assert not await held_back(admin)


def only_the_ill_one_is_left(roster: RosterProcesses) -> None:
    """Checks that the service becomes unready without the healthy runner."""
    watches = Watches(roster.address)
    try:
        watches.wait(LIVENESS=True, READINESS=True, ENGINE=True, RUNNER=True)
        roster.end("runner")
        watches.wait(LIVENESS=True, READINESS=False, ENGINE=True, RUNNER=False)
    finally:
        watches.close()


def is_ready_again(roster: RosterProcesses) -> None:
    """Checks that the service is ready once the runner has recovered."""
    watches = Watches(roster.address)
    try:
        watches.wait(READINESS=True, RUNNER=True)
    finally:
        watches.close()
