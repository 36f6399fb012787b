"""With --deterministic, answers of real processes equal those of the same requests alone, bit for bit.

ROSTER_TEST_DEVICE=cuda serves from a GPU, with a bf16 and an FP8 cache, and with FP8 weights. Requests share a pool
that is too small for them, are drafted, some constrained or with two choices, and the runner is killed while they run.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.client import RosterClient
from roster_client.client.events import Completion, Delta
from roster_client.client.recording import Recording, recordable
from roster_client.client.requests import Options, build_request
from tests.support.chaos import settled
from tests.support.deterministic_cpu import skip_where_refused
from tests.support.processes import RosterProcesses
from tests.support.tested_device import NEEDS_DEVICE, PROCESS_DEVICE
from tests.support.thoroughness import FULL, choice, count
from tests.support.tiny_models import make_tiny_model

REQUESTS = count(40, in_ci=12)
ROUNDS = count(3, in_ci=1)
READY_S = 240.0
RUNNER = {
    "device": PROCESS_DEVICE, "slots": 8, "kv_tokens": 288, "max_step_tokens": 64, "threads": 1, "silence_s": 1.0,
    "deterministic": True, "draft": "ngram", "host_kv_tokens": 4096,
}  # fmt: skip
ON_GPU = {"dtype": "bfloat16"}

pytestmark = NEEDS_DEVICE


def options_of(index: int, rng: random.Random) -> tuple[str, Options]:
    prompt = "".join(rng.choices("abc xyz", k=rng.randrange(3, 60)))
    options: Options = {
        "max_tokens": rng.randrange(20, 70), "ignore_eos": True, "seed": rng.randrange(1 << 32),
        "temperature": rng.choice([0.0, 0.8, 1.0]), "logprobs": rng.choice([0, 3]), "n": rng.choice([1, 1, 1, 2]),
        "prompt_token_ids": True,
    }  # fmt: skip
    if index % 4 == 1:
        options |= {"top_p": 0.9, "repetition_penalty": 1.1}
    if index % 4 == 2:
        options |= {"regex": "([a-d]{3}-){4,14}[0-9]{2,6}", "ignore_eos": False}
    if index % 4 == 3:
        options["prompt_logprobs"] = 1
    return prompt, options


async def answer(client: RosterClient, prompt: str, options: Options, seen: list[int] | None = None) -> Completion:
    stream = client.generate(prompt, raw=True, **options)
    async for event in stream:
        if seen is not None and isinstance(event, Delta):
            seen[0] += len(event.token_ids)
    return await stream.completion()


def bits(completion: Completion) -> list[object]:
    """Returns what must be equal."""
    assert completion.started is not None and completion.usage is not None
    choices = [(choice.token_ids, choice.text, choice.logprobs) for choice in completion.choices]
    return [*choices, list(completion.started.prompt_logprobs), completion.usage.numerics]


async def killed_once(roster: RosterProcesses, seen: list[int], tokens: int) -> None:
    """Kills the runner once `tokens` tokens have come, and starts another."""
    while seen[0] < tokens:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(roster.end, "runner", signal.SIGKILL)
    roster.start_one("runner")


# Quantization, KV dtype, ranks.
ON_GPU_CASES = [("none", "auto", 1), ("none", "fp8_e4m3", 1), ("fp8", "auto", 1)]
CASES = ON_GPU_CASES if PROCESS_DEVICE == "cuda" else [("none", "auto", 1), ("none", "auto", 2)]


@pytest.mark.parametrize(("weights", "cache", "ranks"), choice(CASES, in_ci=[case for case in CASES if case[2] == 1]))
@pytest.mark.timeout(600)
async def test_answers_are_those_of_the_requests_alone(weights: str, cache: str, ranks: int, tmp_path: Path) -> None:
    if PROCESS_DEVICE == "cpu":
        skip_where_refused()
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = make_tiny_model("llama", tmp_path / "tiny", seed, torch.bfloat16, hidden_size=256, intermediate_size=128)
    runner = RUNNER | {"model": str(model), "tensor_parallel": ranks}
    if PROCESS_DEVICE == "cuda":
        runner |= ON_GPU | {"kv_cache_dtype": cache, "quantization": weights}
    asked = [options_of(index, rng) for index in range(REQUESTS)]
    with RosterProcesses(tmp_path, scheduler={"check": True}, runner=runner, ready_s=READY_S) as roster:
        async with RosterClient(roster.address, reconnect_s=READY_S) as client:
            served = await client.get_model()
            assert len(served.numerics) == 32
            alone = [await answer(client, *each) for each in asked]
            assert all(each.usage is not None and each.usage.numerics == served.numerics for each in alone)
            for number in range(ROUNDS + 1):
                seen = [0]
                killer = asyncio.create_task(killed_once(roster, seen, 150) if number == ROUNDS else asyncio.sleep(0))
                together = await asyncio.gather(*(answer(client, *each, seen) for each in asked))
                await killer
                different = [
                    index for index, (one, other) in enumerate(zip(alone, together, strict=True))
                    if bits(one) != bits(other)
                ]  # fmt: skip
                assert not different, (number, [(asked[index], alone[index], together[index]) for index in different])
                if number == ROUNDS - 1:
                    status = await settled(roster, 1, within_s=READY_S)
                    assert status.totals.preemptions > 0, "the pool was not tight enough to test preemption"
                    tier = status.totals.host_tier
                    assert tier.offloaded_blocks > 0 and (tier.loaded_blocks > 0 or not FULL), tier
                    print(f"{status.totals.swaps} swaps, {tier.loaded_blocks} blocks loaded")
            assert (await client.get_model()).numerics == served.numerics, (
                "another runner of the same has other numerics"
            )
            records = []
            for index, ((prompt, options), completion) in enumerate(zip(asked[:4], alone, strict=False)):
                request = build_request(prompt, options, raw=True)
                recordable(request)
                records.append(tmp_path / f"{index}.json")
                Recording.of(request, completion, served).write(records[-1])
        result = CliRunner().invoke(app, ["verify", *map(str, records), "--server", roster.address])
        assert result.exit_code == 0 and result.output.count("equal, ") >= 4, result.output
        print(
            f"{len(asked)} requests, {status.totals.preemptions} preemptions, {result.output.count('equal')} verified"
        )
