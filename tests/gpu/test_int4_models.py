"""Whole models with 4-bit matrices on a GPU: the greedy tokens of transformers' model with the same numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.gpu_backends import FAMILIES, load
from tests.support.greedy_driver import RandomDriver
from tests.support.parity import BFLOAT16, FLOAT16, Parity
from tests.support.tiny_models import NUM_TOKENS
from tests.support.tiny_quantized import make_tiny_quantized


@pytest.mark.parametrize(
    ("kind", "family", "dtype"),
    [
        ("awq", "llama", torch.bfloat16),
        ("awq", "llama", torch.float16),
        ("gptq", "qwen3", torch.bfloat16),
        ("gptq-reordered", "llama", torch.bfloat16),
        ("gptq-reordered", "llama-biases", torch.bfloat16),
        ("packed", "gemma2", torch.bfloat16),
        ("packed-asymmetric", "qwen2", torch.bfloat16),
        ("packed-channel", "llama", torch.bfloat16),
    ],
)
def test_greedy_tokens(kind: str, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    sizes = {**FAMILIES[family], "intermediate_size": 128}
    folder, model = make_tiny_quantized(kind, family, tmp_path, seed, **sizes)
    parity = Parity(model, BFLOAT16 if dtype is torch.bfloat16 else FLOAT16)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    streams = RandomDriver(load(folder, dtype), rng).generate(prompts, 12, 20)
    parity.check(prompts, streams, 12)
    parity.assert_few_ties()
