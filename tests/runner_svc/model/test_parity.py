"""Greedy output equals transformers' generate in float32, for each family and any chunking of the prompts.

ROSTER_TEST_DEVICE selects the backend.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.greedy_driver import RandomDriver
from tests.support.parity import Parity
from tests.support.tested_backend import TESTED, reference
from tests.support.tested_device import NEEDS_DEVICE
from tests.support.thoroughness import FULL, choice
from tests.support.tiny_models import FAMILIES, IN_CI, NUM_TOKENS

MAX_TOKENS = 16
PROMPT_LENGTHS = (1, 70)
NUM_PROMPTS = TESTED.count(3, in_ci=2)
"""Number of prompts for each chunking."""

pytestmark = NEEDS_DEVICE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def some_prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(*PROMPT_LENGTHS))] for _ in range(NUM_PROMPTS)]


@pytest.mark.parametrize("family", choice(list(FAMILIES), in_ci=IN_CI))
def test_random_plans_give_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = TESTED.make_model(family, tmp_path / family, seed)
    parity = Parity(reference(folder, TESTED.tiny), TESTED.tiny)
    for wanted, max_chunk in ((8, 1), (16, 9), (32, 70)):
        if FULL or max_chunk == 1:  # in CI one call of `generate` is compared with all chunkings
            prompts = some_prompts(rng)
        block_size = TESTED.block_size(wanted)
        backend = TESTED.load(
            folder, num_blocks=640 // block_size, block_size=block_size, num_slots=4, max_step_tokens=256
        )
        streams = RandomDriver(backend, rng).generate(prompts, MAX_TOKENS, max_chunk)
        parity.check(prompts, streams, MAX_TOKENS)
    parity.assert_few_ties()
