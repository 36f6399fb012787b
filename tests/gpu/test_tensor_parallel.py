"""Two ranks on one GPU that exchange over shared memory: tokens of one rank, and one of them killed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.common.random_model import SHAPES, write_folder
from runner_svc.execution.runner import Runner
from tests.support.greedy_driver import RandomDriver
from tests.support.plans import SAMPLE, admission, plan, sampling
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.gpu.backend import CudaBackend
from tests.support.gpu_backends import BLOCK_SIZE, FAMILIES, load
from tests.support.gpu_ranks import GpuRanks, model_arguments

TOKENS, SIZES = 6, {"num_slots": 4, "max_step_tokens": 64, "num_blocks": 60}
# Largest gap between the likeliest tokens where two may differ, as a share of the standard deviation of a position's
# log-probabilities: 16-bit sums in another order, and rows that each rank rounds to FP8 by its own largest.
GAP, FP8_GAP = 0.15, 0.6
SPLIT = {"intermediate_size": 512}
"""A width that the kernels support also in two parts."""
Asked = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuRanks]:
    both = GpuRanks(2, tmp_path_factory.mktemp("ranks"))
    yield both
    both.close()


@pytest.fixture(scope="module")
def epochs() -> Iterator[int]:
    return iter(range(1, 1000))


@pytest.fixture
def seed() -> int:
    print(f"seed {(drawn := random.randrange(2**31))}")
    return drawn


def prompts_of(seed: int, num_tokens: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(num_tokens) for _ in range(rng.randint(1, 30))] for _ in range(4)]


def gap_at(backend: CudaBackend, prompt: list[int], generated: list[int], other: int) -> float:
    """Returns how far below the likeliest token's `other`'s log-probability is, in standard deviations."""
    runner = Runner(backend)
    runner.reset()
    tokens, asked = prompt + generated, 20
    blocks = list(range(1, -(-len(tokens) // BLOCK_SIZE) + 1))
    first = admission(3, tokens, blocks, prompt_len=len(prompt), sampling=sampling(logprobs=asked))
    result = runner.execute(1, plan(admissions=[first], extents=[(3, 0, len(tokens), SAMPLE)]))
    values = np.frombuffer(result.logprobs[0].top_values, np.float32)
    ids = np.frombuffer(result.logprobs[0].top_ids, np.int32).tolist()
    assert other in ids, f"token {other} is not among the {asked} likeliest"
    spread = float(backend._steps.logits[0].std())
    return float(values[0] - values[ids.index(other)]) / spread


def compare(
    ranks: GpuRanks, epoch: int, folder: Path, seed: int, num_tokens: int, allowed: float, **asked: Any
) -> list[list[int]]:
    """Asserts that both ranks give one's tokens, but for near ties; returns the ranks' tokens."""
    prompts = prompts_of(seed, num_tokens)
    alone = load(folder, **{**SIZES, **model_arguments(asked)})
    expected = RandomDriver(alone, random.Random(seed)).generate(prompts, TOKENS, 40)
    assert ranks.all("load", folder=str(folder), **SIZES, **asked) == [{"blocks": 60}] * 2
    formed = ranks.all("form", epoch=epoch)
    print(f"formed: {formed}")
    actual, other = ranks.all("generate", prompts=prompts, seed=seed, max_tokens=TOKENS)
    assert actual == other
    ties = 0
    for prompt, ours, wanted in zip(prompts, actual, expected, strict=True):
        if ours != wanted:
            place = next(i for i, (a, b) in enumerate(zip(ours, wanted, strict=True)) if a != b)
            gap = gap_at(alone, prompt, wanted[:place], ours[place])
            print(f"token {place} is {ours[place]}, not {wanted[place]}: gap {gap:.4f}")
            assert gap < allowed
            ties += 1
    print(f"{ties} near ties in {len(prompts)} texts")
    return actual


@pytest.mark.parametrize(
    ("family", "asked", "allowed"),
    [
        pytest.param("llama", {}, GAP, id="plain"),
        pytest.param("llama", {"fp8_cache": True}, FP8_GAP, id="fp8 cache"),
        pytest.param("llama", {"on_load": "fp8"}, FP8_GAP, id="fp8 weights"),
        pytest.param("llama", {"on_load": "int4"}, GAP, id="int4 weights"),
        pytest.param("llama-biases", {"dtype": "float16"}, GAP, id="biases"),
        pytest.param("gemma3", {}, GAP, id="gemma3"),
        pytest.param("qwen3-moe", {}, 2 * GAP, id="experts"),
    ],
)
def test_two_ranks_give_the_tokens_of_one(
    family: str, asked: Asked, allowed: float, ranks: GpuRanks, epochs: Iterator[int], seed: int, tmp_path: Path
) -> None:
    sizes = {**FAMILIES[family], **SPLIT}
    if family == "qwen3-moe":  # all experts, as a near tie between two may fall either way
        sizes |= {"moe_intermediate_size": 128, "num_experts_per_tok": 8}
    folder = make_tiny_model(family, tmp_path / "tiny", seed % 1000, torch.bfloat16, **sizes)
    compare(ranks, next(epochs), folder, seed, NUM_TOKENS, allowed, **asked)


@pytest.mark.parametrize("asked", [{}, {"on_load": "fp8", "fp8_cache": True}], ids=["bf16", "fp8"])
def test_four_layers_of_an_8b_shape(
    asked: Asked, ranks: GpuRanks, epochs: Iterator[int], seed: int, tmp_path: Path
) -> None:
    folder, name = tmp_path / "8b", "llama-3.1-8b"
    write_folder(name, folder)
    shape = {**SHAPES[name], "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(shape))
    allowed = FP8_GAP if asked else GAP
    compare(ranks, next(epochs), folder, seed, shape["vocab_size"], allowed, random_weights=True, **asked)


@pytest.mark.parametrize("asked", [{}, {"on_load": "fp8", "fp8_cache": True}], ids=["bf16", "fp8"])
def test_deterministic_ranks_do_not_depend_on_the_plans(
    asked: Asked, ranks: GpuRanks, epochs: Iterator[int], seed: int, tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny", seed % 1000, torch.bfloat16, **FAMILIES["llama"], **SPLIT)
    prompts = prompts_of(seed, NUM_TOKENS)
    ranks.all("load", folder=str(folder), deterministic=True, **SIZES, **asked)
    ranks.all("form", epoch=next(epochs))
    given = [
        each
        for other in range(3)
        for each in ranks.all("generate", prompts=prompts, seed=seed + other, max_tokens=2 * TOKENS)
    ]
    assert given == [given[0]] * 6


def test_a_rank_is_killed_and_the_other_forms_again_with_a_new_process(
    epochs: Iterator[int], seed: int, tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny", seed % 1000, torch.bfloat16, **FAMILIES["llama"], **SPLIT)
    (tmp_path / "ranks").mkdir()
    both, prompts = GpuRanks(2, tmp_path / "ranks"), prompts_of(seed, NUM_TOKENS)
    try:
        both.all("load", folder=str(folder), **SIZES)
        both.all("form", epoch=1)
        expected = both.all("generate", prompts=prompts, seed=seed, max_tokens=TOKENS)[0]
        survivor = both.pids[0]
        for rank in (0, 1):
            both.ask(rank, "lose", prompts=prompts, seed=seed, max_tokens=200)
        time.sleep(1.0)
        both.kill(1)
        time.sleep(0.2)  # the survivor waits in a kernel
        both.give_up(1, "rank 1 was killed")
        lost = both.answer(0, 10.0)
        print(f"the survivor came out {lost['since']:.3f} s after it was told: {lost['error']}")
        assert "rank 1 was killed" in lost["error"] and lost["since"] < 1.0 and not lost["broken"]
        both.start(1)
        both.ask(1, "load", folder=str(folder), **SIZES)
        both.answer(1)
        formed = both.all("form", epoch=2)
        print(f"formed again: {formed}")
        assert [each["captured"] for each in formed] == [False, True] and formed[0]["loads"] == 1
        assert both.pids[0] == survivor
        assert both.all("generate", prompts=prompts, seed=seed, max_tokens=TOKENS) == [expected] * 2
    finally:
        both.close()
