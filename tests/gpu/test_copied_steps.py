"""A model's steps beside copies of KV blocks, and a prefix that went to the host pool and back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.host_copies import check_prefix, check_steps
from tests.support.tiny_models import make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.gpu.backend import CudaBackend
from tests.support.gpu_backends import FAMILIES, load


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def tiny(tmp_path: Path, rng: random.Random, fp8_cache: bool = False) -> CudaBackend:
    folder = make_tiny_model("llama", tmp_path / "tiny", rng.randrange(1000), torch.bfloat16, **FAMILIES["llama"])
    return load(folder, fp8_cache=fp8_cache)


def test_steps_are_the_same_while_blocks_are_copied(tmp_path: Path, rng: random.Random) -> None:
    check_steps(tiny(tmp_path, rng), rng)


@pytest.mark.parametrize("fp8_cache", [False, True])
def test_a_prefix_that_went_out_and_came_back_decodes_alike(
    fp8_cache: bool, tmp_path: Path, rng: random.Random
) -> None:
    check_prefix(tiny(tmp_path, rng, fp8_cache), rng, poison=0x7F if fp8_cache else 0xFF)  # NaN
