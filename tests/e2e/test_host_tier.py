"""What left a runner's cache comes back from its host pool, over real links, also after the scheduler was killed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from roster_client.client.admin import AdminClient
from roster_client.client.errors import UnavailableError
from roster_client.client.events import Completion
from roster_client.client.sync_client import SyncRosterClient
from roster_protos import admin_pb2
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.processes import RosterProcesses, roster_processes

BLOCK, LENGTH, CACHE = 16, 128, 512
RUNNER = {
    "device": "hash", "slots": 4, "kv_tokens": CACHE, "host_kv_tokens": 4096, "silence_s": 1.0,
    "test_backend": {"eos_probability": 0.0, "copy_delay_ms": 2},
}  # fmt: skip


@pytest.fixture
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    with roster_processes(tmp_path_factory.mktemp("tier"), scheduler={"check": True}, runner=RUNNER) as processes:
        yield processes


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(256), k=LENGTH)


def complete(roster: RosterProcesses, number: int) -> Completion:
    """Sends a prompt, again if a front worker of a scheduler that was killed still takes it."""
    for _ in range(100):
        with suppress(UnavailableError), SyncRosterClient(roster.address) as client:
            return client.generate(prompt(number), max_tokens=4, temperature=0.0).completion()
        time.sleep(0.1)
    raise AssertionError("the service is not available")


def ask(roster: RosterProcesses, number: int) -> int:
    """Sends a prompt; returns how many of its tokens were cached, after checking the answer."""
    completion = complete(roster, number)
    assert completion.token_ids == expected_tokens(prompt(number), 4, eos_probability=0.0)
    assert completion.usage is not None
    return completion.usage.cached_tokens


async def host_tier(roster: RosterProcesses) -> admin_pb2.HostTier:
    async with AdminClient(roster.admin_address) as admin:
        return (await admin.get_status()).totals.host_tier


async def test_a_lost_prefix_is_loaded_before_and_after_the_scheduler_was_killed(roster: RosterProcesses) -> None:
    for number in range(10):
        assert ask(roster, number) == 0
    kept = [number for number in range(8) if ask(roster, number) == LENGTH - BLOCK]
    before = await host_tier(roster)
    assert len(kept) >= 3 and before.loaded_tokens >= 2 * (LENGTH - BLOCK)
    # On a busy machine a load may be late; then its prompt is computed, and is not kept.
    assert before.wasted_blocks <= (LENGTH // BLOCK - 1) * (8 - len(kept))
    runner = roster.pid("runner")
    roster.end("scheduler", signal.SIGKILL)
    roster.start_one("scheduler")
    roster.wait_ready()
    hits = [ask(roster, number) for number in kept]
    assert hits.count(LENGTH - BLOCK) >= 2, "its successor names blocks as it did"
    assert (await host_tier(roster)).loaded_tokens == sum(hits) and roster.pid("runner") == runner


async def test_a_runner_that_was_killed_has_lost_its_host_pool_and_nothing_else(roster: RosterProcesses) -> None:
    for number in range(10):
        ask(roster, number)
    roster.end("runner", signal.SIGKILL)
    roster.start_one("runner")
    roster.wait_ready()
    assert ask(roster, 6) == 0
