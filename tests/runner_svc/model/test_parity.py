"""Greedy output equals transformers' generate in float32, for each family, however the prompts are cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runner_svc.torch_backend import TorchBackend
from tests.support.greedy_driver import RandomDriver
from tests.support.parity import MAX_NEAR_TIES, count_near_ties
from tests.support.thoroughness import count
from tests.support.tiny_models import FAMILIES, NUM_TOKENS, make_tiny_model

MAX_TOKENS = 16
PROMPT_LENGTHS = (1, 70)
NUM_PROMPTS = count(3, in_ci=2)
"""Of each way to cut them."""


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load_backend(folder: Path, block_size: int, max_step_tokens: int = 256) -> TorchBackend:
    backend = TorchBackend.load(
        str(folder),
        cache_folder=folder / "unused",
        progress=lambda what, share: None,
        num_blocks=640 // block_size,
        block_size=block_size,
        num_slots=4,
        max_step_tokens=max_step_tokens,
    )
    backend.cache.data.fill_(torch.nan)  # nothing may be read that was not written
    return backend


@pytest.mark.parametrize("family", FAMILIES)
def test_random_plans_give_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / family, seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    near_ties = 0
    for block_size, max_chunk in ((8, 1), (16, 9), (32, 70)):
        prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(*PROMPT_LENGTHS))] for _ in range(NUM_PROMPTS)]
        actual = RandomDriver(load_backend(folder, block_size), rng).generate(prompts, MAX_TOKENS, max_chunk)
        near_ties += count_near_ties(model, prompts, actual, MAX_TOKENS)
    assert near_ties <= MAX_NEAR_TIES
