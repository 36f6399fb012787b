"""A model divided among ranks gives the greedy tokens of transformers' whole one, near ties counted.

The ranks are threads that exchange through a list.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.greedy_driver import RandomDriver
from tests.support.parity import FLOAT32, Parity
from tests.support.ranked_backend import RankedBackend
from tests.support.tested_backend import poison, reference
from tests.support.thoroughness import choice
from tests.support.tiny_models import FAMILIES, IN_CI, NUM_TOKENS, make_tiny_model

MAX_TOKENS = 12
SIZES: dict[str, int] = {"num_blocks": 80, "block_size": 8, "num_slots": 4, "max_step_tokens": 128}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ranked(folder: Path, size: int, **options: Any) -> RankedBackend:
    backend = RankedBackend(folder, size, **SIZES, **options)
    poison(backend.cache.data)  # type: ignore[arg-type]
    return backend


@pytest.mark.parametrize("family", choice(list(FAMILIES), in_ci=IN_CI))
def test_ranks_give_the_tokens_of_generate(family: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / family, seed)
    parity = Parity(reference(folder, FLOAT32), FLOAT32)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    for size in _sizes(folder):
        backend = ranked(folder, size)
        streams = RandomDriver(backend, rng).generate(prompts, MAX_TOKENS, 17)
        parity.check(prompts, streams, MAX_TOKENS)
    parity.assert_few_ties()


def _sizes(folder: Path) -> list[int]:
    """Returns the numbers of ranks that the model's heads allow."""
    from runner_svc.model.config import ModelConfig
    from runner_svc.model.folder.config_file import read_config

    config = ModelConfig.from_hugging_face(read_config(folder))
    return [size for size in (2, 3, 4) if config.num_heads % size == 0 and
            (config.num_kv_heads % size == 0 or size % config.num_kv_heads == 0)]
