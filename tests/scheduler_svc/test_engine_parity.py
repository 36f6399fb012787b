"""Greedy output equals transformers' generate in float32 through the whole engine: random arrivals, chunks from one
position to the whole prompt, every depth and block size, and a pool so small that preemption is the rule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from runner_svc.model.errors import ModelNotFound
from runner_svc.model.source import DEFAULT_MODEL, model_folder
from runner_svc.settings import default_cache_folder
from runner_svc.torch_backend import TorchBackend
from tests.support.in_process import Stack
from tests.support.parity import count_near_ties
from tests.support.thoroughness import count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

FAMILIES = ("llama-llama3", "llama-dynamic", "mistral", "qwen2", "qwen3")
MAX_TOKENS = 40
NUM_REQUESTS = count(16, in_ci=6)
POOL_TOKENS = 64
MAX_NEAR_TIES = 1
"""Of all streams of a family."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Setup:
    """How the requests are served."""

    depth: int
    block_size: int
    step_tokens: int
    num_requests: int = NUM_REQUESTS
    max_tokens: int = MAX_TOKENS


def load_backend(folder: Path, num_blocks: int, block_size: int) -> TorchBackend:
    return TorchBackend.load(
        str(folder),
        cache_folder=folder / "unused",
        progress=lambda what, share: None,
        num_blocks=num_blocks,
        block_size=block_size,
        num_slots=6,
        max_step_tokens=128,
    )


def serve(folder: Path, rng: random.Random, vocab_size: int, setup: Setup) -> tuple[Stack, int]:
    """All requests through a small pool; returns the stack and its preemptions."""
    stack = Stack(depth=setup.depth, policy_parameters={"step_tokens": setup.step_tokens})
    block_size = setup.block_size
    session = stack.add_runner(load_backend(folder, POOL_TOKENS // block_size, block_size))
    for _ in range(setup.num_requests):
        stack.submit([rng.randrange(vocab_size) for _ in range(rng.randint(1, 24))], setup.max_tokens)
        for _ in range(rng.randrange(6)):
            stack.turn(rng)
    stack.run(rng)
    stack.assert_clean()
    return stack, stack.engine.pool.schedulers[session].preemptions


def compare(stack: Stack, model: Any, max_tokens: int) -> int:
    """Near ties among the streams; any other difference from transformers fails."""
    prompts = [np.frombuffer(r.submit.prompt, "<i4").tolist() for r in stack.requests.values()]
    streams = [stack.streams[r.first_sequence_id or 0].tokens for r in stack.requests.values()]
    return count_near_ties(model, prompts, streams, max_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_runner_give_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / family, seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    preemptions = near_ties = 0
    for setup in (Setup(1, 16, 6), Setup(2, 8, 128), Setup(3, 32, 17)):
        stack, preempted = serve(folder, rng, NUM_TOKENS, setup)
        preemptions += preempted
        near_ties += compare(stack, model, MAX_TOKENS)
    print(f"{preemptions} preemptions, {near_ties} near ties in {3 * NUM_REQUESTS} streams")
    assert preemptions >= 2 * NUM_REQUESTS
    assert near_ties <= MAX_NEAR_TIES


@pytest.mark.parametrize("family", ["llama-dynamic", "qwen2"])
def test_shared_prefixes_give_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    """`llama-dynamic` was trained to 32 positions: shorter prompts share, longer ones must not."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / family, seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stem = [rng.randrange(NUM_TOKENS) for _ in range(40)]
    prompts = [
        stem[: rng.randint(1, 40)] + [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 4))] for _ in range(24)
    ]
    cached, near_ties = [], 0
    for sharing in (True, False):
        stack = Stack(prefix_sharing=sharing, policy_parameters={"step_tokens": 20})
        session = stack.add_runner(load_backend(folder, num_blocks=40, block_size=4))
        for prompt in prompts:
            stack.submit(prompt, 8)
            for _ in range(rng.randrange(4)):
                stack.turn(rng)
        stack.run(rng)
        near_ties += compare(stack, model, 8)
        cached.append(stack.engine.pool.schedulers[session].cached_tokens)
    print(f"{cached[0]} prompt tokens from the cache, {near_ties} near ties in {2 * len(prompts)} streams")
    assert cached[0] > 20 and cached[1] == 0
    assert near_ties <= MAX_NEAR_TIES


def test_smollm2_through_the_engine_gives_the_tokens_of_generate() -> None:
    try:
        folder = model_folder(DEFAULT_MODEL, default_cache_folder(), lambda what, share: None)
    except ModelNotFound as error:
        pytest.skip(str(error))
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    setup = Setup(2, 16, 16, num_requests=count(5, in_ci=4), max_tokens=count(20, in_ci=14))
    stack, preemptions = serve(folder, random.Random(seed), model.config.vocab_size, setup)
    near_ties = compare(stack, model, setup.max_tokens)
    print(f"{preemptions} preemptions, {near_ties} near ties in {setup.num_requests} streams")
    assert near_ties <= MAX_NEAR_TIES
