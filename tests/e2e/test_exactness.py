"""Streams of real processes equal the hash model's expected tokens, while requests share a tiny pool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Completion, FinishReason
from roster_client.client.requests import Options
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.processes import RosterProcesses, roster_processes
from tests.support.thoroughness import count

REQUESTS = count(120, in_ci=50)
LONGEST = 60
GROWING = 8
"""Requests that arrive together and outgrow the pool, so that some are preempted whatever the other requests are."""


# Depth, block size, KV tokens, ranks: each pool holds little more than the longest sequence, so that eight slots
# preempt.
@pytest.fixture(
    scope="module",
    params=[(1, 8, 160, 1), (2, 16, 192, 1), (3, 32, 256, 1), (2, 16, 192, 3)],
    ids=lambda p: "-".join(map(str, p)),
)
def roster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    depth, block_size, kv_tokens, ranks = request.param
    runner = {
        "device": "hash", "slots": 8, "block_size": block_size, "kv_tokens": kv_tokens, "max_step_tokens": 24,
        "tensor_parallel": ranks,
    }  # fmt: skip
    scheduler = {"depth": depth, "check": True}
    with roster_processes(tmp_path_factory.mktemp("exact"), scheduler=scheduler, runner=runner) as processes:
        yield processes


def random_options(rng: random.Random) -> Options:
    max_tokens = rng.randrange(1, LONGEST)
    return {
        "n": rng.choice([1, 1, 1, 2, 3]),
        "temperature": rng.choice([0.0, 1.0]),
        "seed": rng.randrange(1 << 64),
        "max_tokens": max_tokens,
        "min_tokens": rng.choice([0, rng.randrange(max_tokens + 1)]),
        "stop_token_ids": [rng.randrange(256) for _ in range(rng.randrange(4))],
        "ignore_eos": rng.random() < 0.3,
    }


def growing_options(rng: random.Random) -> Options:
    return {
        "n": 1,
        "temperature": 1.0,
        "seed": rng.randrange(1 << 64),
        "max_tokens": LONGEST - 1,
        "min_tokens": 0,
        "stop_token_ids": [],
        "ignore_eos": True,
    }


def expectation(prompt: list[int], options: Any, index: int) -> list[int]:
    stop_ids = list(options["stop_token_ids"]) + ([] if options["ignore_eos"] else [IM_END_ID])
    return expected_tokens(
        prompt,
        options["max_tokens"],
        temperature=options["temperature"],
        seed=options["seed"],
        sample_index=index,
        min_tokens=options["min_tokens"],
        stop_ids=stop_ids,
    )


async def test_streamed_tokens_equal_the_slow_twin(roster: RosterProcesses, wait_idle: Any) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    jobs = [([rng.randrange(256) for _ in range(LONGEST // 3)], growing_options(rng), 0.0) for _ in range(GROWING)]
    jobs += [
        ([rng.randrange(256) for _ in range(rng.randrange(1, LONGEST))], random_options(rng), rng.expovariate(1.5))
        for _ in range(REQUESTS - GROWING)
    ]

    async def run(client: RosterClient, prompt: list[int], options: Options, delay_s: float) -> Completion:
        await asyncio.sleep(delay_s)
        return await client.generate(prompt, **options).completion()

    async with RosterClient(roster.address) as client:
        completions = await asyncio.gather(*[run(client, *job) for job in jobs])
    for (prompt, options, _), completion in zip(jobs, completions, strict=True):
        assert len(completion.choices) == options["n"]
        for choice in completion.choices:
            expected = expectation(prompt, options, choice.index)
            assert choice.token_ids == expected, (prompt, options, choice.index)
            assert choice.finish is not None and choice.finish.num_tokens == len(expected)
            whole = len(expected) == options["max_tokens"]
            assert choice.finish.reason is FinishReason.STOP or (choice.finish.reason is FinishReason.LENGTH and whole)
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == len(prompt)
        assert completion.usage.completion_tokens == sum(len(choice.token_ids) for choice in completion.choices)
    status = await wait_idle(roster.admin_address)
    assert status.totals.preemptions > 0, "the pool was not tight enough to test preemption"
    assert status.totals.finished == sum(options["n"] for _, options, _ in jobs)
