"""Moves between real processes: sequences leave a runner that ends, and prompts and tokens have runners of their own.

Every answer equals the solo answer; no position is computed twice where nothing fails.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from roster_client.client import RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.events import Completion
from roster_common.curve_keys import generate
from roster_protos import admin_pb2
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.chaos import settled
from tests.support.processes import RosterProcesses
from tests.support.tiny_models import make_tiny_model

TOKENS = 300
SCHEDULER = {"flush_ms": 5, "check": True}
RUNNER = {
    "device": "hash",
    "slots": 16,
    "kv_tokens": 16384,
    "move_listen": "127.0.0.1:0",
    "test_backend": {"step_ms": 5, "eos_probability": 0},
}


def prompts_of(rng: random.Random, count: int, longest: int = 400) -> list[list[int]]:
    return [[rng.randrange(256) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


async def check(client: RosterClient, prompt: list[int], tokens: int = TOKENS) -> None:
    """Checks that the answer equals the solo answer."""
    completion = await client.generate(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0).completion()
    assert completion.choices[0].token_ids == expected_tokens(prompt, tokens, eos_probability=0)


async def status_of(admin: AdminClient) -> admin_pb2.GetStatusResponse:
    return await admin.get_status(deadline_s=10)


async def until_running(admin: AdminClient, runner: str, count: int) -> None:
    """Waits until the runner has at least `count` sequences."""
    while True:
        runners = {entry.id: entry.running for entry in (await status_of(admin)).runners}
        if runners.get(runner, 0) >= count:
            return
        await asyncio.sleep(0.02)


async def run_and_end(roster: RosterProcesses, prompts: Sequence[list[int]], runner: str) -> None:
    """Answers all prompts while `runner` has to end."""
    async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
        await until_runners(admin, "runner", "runner-2")
        streams = [asyncio.create_task(check(client, prompt)) for prompt in prompts]
        await until_running(admin, runner, len(prompts) // 3)
        await asyncio.sleep(0.2)
        assert await asyncio.to_thread(roster.end, runner, signal.SIGTERM) == 0
        assert not all(stream.done() for stream in streams), "the streams ended before their runner"
        await asyncio.gather(*streams)


async def test_a_leaving_runner_gives_its_sequences_away(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, runners=2) as roster:
        roster.await_workers(1)
        prompts = prompts_of(random.Random(1), 12)
        await run_and_end(roster, prompts, "runner-2")
        logs = roster.logs()
        assert "moves_out=True" in logs and "sequences=0" in logs, logs
        await settled(roster, 1)


async def test_prompts_and_tokens_have_runners_of_their_own(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, runners=2) as roster:
        roster.await_workers(1)
        assert roster.end("runner") == 0 and roster.end("runner-2") == 0
        roster.change("runner", role="prefill")
        roster.change("runner-2", role="decode")
        prompts = prompts_of(random.Random(2), 10)
        async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
            for name in ("runner", "runner-2"):
                roster.start_one(name)
                await until_runners(admin, name)
            await asyncio.gather(*(check(client, prompt) for prompt in prompts))
            status = await status_of(admin)
        assert {entry.id: entry.role for entry in status.runners} == {"runner": "prefill", "runner-2": "decode"}
        assert status.moves.sequences == status.moves.by_use["role"] == len(prompts), status.moves
        again = status.totals.prefill_tokens - sum(map(len, prompts))
        assert 0 <= again <= len(prompts)  # a moved sequence's last token is no decoding row
        assert not status.moves.failed and status.moves.bytes["tcp"] == 128 * status.moves.blocks
        await settled(roster, 2)


async def until_runners(admin: AdminClient, *names: str) -> None:
    """Waits until these runners serve."""
    while not {*names} <= {entry.id for entry in (await status_of(admin)).runners}:
        await asyncio.sleep(0.05)


async def test_a_full_runner_gives_sequences_to_one_that_joins_late(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, runners=2) as roster:
        roster.await_workers(1)
        assert roster.end("runner-2") == 0
        prompts = prompts_of(random.Random(3), 12)
        async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
            streams = [asyncio.create_task(check(client, prompt, 800)) for prompt in prompts]
            await until_running(admin, "runner", len(prompts))
            roster.start_one("runner-2")
            await until_running(admin, "runner-2", 3)
            await asyncio.gather(*streams)
            status = await status_of(admin)
        assert status.moves.by_use["balance"] >= 3
        assert 0 <= status.totals.prefill_tokens - sum(map(len, prompts)) <= status.moves.sequences
        await settled(roster, 2)


async def test_a_hot_prefix_is_copied_to_the_second_runner(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER, runners=2) as roster:
        roster.await_workers(1)
        (prefix,) = prompts_of(random.Random(4), 1)
        prefix = (prefix * 400)[:800]
        async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
            await until_runners(admin, "runner", "runner-2")
            await check(client, prefix, 3)
            await asyncio.gather(*(check(client, [*prefix, 255, number], 200) for number in range(30)))
            status = await status_of(admin)
        assert status.moves.by_use["prefix"] == 1, status.moves
        # The prefix once, and two tokens and perhaps a copied one of each other prompt.
        assert status.totals.prefill_tokens <= len(prefix) + 30 * 18
        await settled(roster, 2)


@pytest.mark.parametrize("victim", ["source", "target"])
async def test_a_runner_killed_in_mid_copy_costs_nothing_but_time(tmp_path: Path, victim: str) -> None:
    slow = {**RUNNER, "test_backend": {"step_ms": 15, "eos_probability": 0, "move_chunk_ms": 400}}
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=slow, runners=3) as roster:
        roster.await_workers(1)
        prompts = prompts_of(random.Random(5), 12)
        async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
            await until_runners(admin, "runner", "runner-2", "runner-3")
            streams = [asyncio.create_task(check(client, prompt, 320)) for prompt in prompts]
            for name in ("runner", "runner-2", "runner-3"):
                await until_running(admin, name, 3)
            roster.send("runner-2", signal.SIGTERM)
            while not (await status_of(admin)).moves.under_way:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # a copy takes 0.8 s
            killed = "runner-2" if victim == "source" else "runner-3"
            roster.end(killed, signal.SIGKILL)
            await asyncio.gather(*streams)
        left = {"runner", "runner-2", "runner-3"} - {killed, "runner-2"}
        await settled(roster, len(left))


async def test_the_link_and_moves_are_encrypted_with_the_same_keys(tmp_path: Path) -> None:
    keys = {name: generate(tmp_path, name) for name in ("scheduler", "runner")}
    allowed = tmp_path / "allowed"
    allowed.write_text(keys["runner"][1].read_text())
    scheduler = {**SCHEDULER, "link_key": keys["scheduler"][0], "link_runners": allowed}
    runner = {
        **RUNNER,
        "runner_key": keys["runner"][0],
        "scheduler_key": keys["scheduler"][1],
        "move_listen": "0.0.0.0:0",
    }
    with RosterProcesses(tmp_path, scheduler=scheduler, runner=runner, runners=2) as roster:
        roster.await_workers(1)
        await run_and_end(roster, prompts_of(random.Random(6), 9), "runner-2")
        assert "sequences=0" in roster.logs()
        await settled(roster, 1)


async def answers(roster: RosterProcesses, prompts: Sequence[str], meanwhile: Callable[[], None]) -> list[Completion]:
    """Returns greedy answers with log-probabilities; calls `meanwhile` in a thread once all prompts decode."""
    async with RosterClient(roster.address) as client, AdminClient(roster.admin_address) as admin:
        await until_runners(admin, "runner", "runner-2")
        streams = [
            asyncio.create_task(
                client.generate(prompt, max_tokens=150, ignore_eos=True, temperature=0.0, logprobs=1).completion()
            )
            for prompt in prompts
        ]
        await until_running(admin, "runner-2", 2)
        await asyncio.to_thread(meanwhile)
        return list(await asyncio.gather(*streams))


async def test_a_models_bits_are_the_same_after_a_move(tmp_path: Path) -> None:
    """A tiny model on two runners with --deterministic: moved in mid-answer, every bit is that of the runner alone."""
    model = make_tiny_model("llama", tmp_path / "model")
    runner = {
        "device": "cpu",
        "model": model,
        "deterministic": True,
        "slots": 8,
        "kv_tokens": 4096,
        "move_listen": "127.0.0.1:0",
        "cache_dir": tmp_path / "cache",
    }
    prompts = ["hello " * number for number in range(1, 9)]
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=runner, runners=2) as roster:
        roster.await_workers(1)
        moved = await answers(roster, prompts, lambda: roster.end("runner-2"))
        async with AdminClient(roster.admin_address) as admin:
            status = await status_of(admin)
        assert status.moves.by_use["drain"] >= 2 and not status.moves.failed, status.moves
        assert "sequences=0" in roster.logs()
        async with RosterClient(roster.address) as client:
            for prompt, completion in zip(prompts, moved, strict=True):
                alone = await client.generate(
                    prompt, max_tokens=150, ignore_eos=True, temperature=0.0, logprobs=1
                ).completion()
                (first,), (second,) = completion.choices, alone.choices
                assert first.token_ids == second.token_ids
                assert [each.sampled for each in first.logprobs] == [each.sampled for each in second.logprobs]
