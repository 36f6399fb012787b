"""Frequency factors, as parameters of transformers' rotary embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from runner_svc.gguf.conversion import Conversion
from tests.support.gguf_bytes import StoredTensor
from tests.support.gguf_cases import llama3_factors
from tests.support.thoroughness import choice
from tests.support.tiny_gguf import tiny_gguf, tiny_model


def parameters(tmp_path: Path, architecture: str, tensors: dict[str, list[float]], keys: dict[str, Any]) -> Any:
    file = tiny_gguf(architecture, tiny_model(architecture))
    file.keys |= {f"{architecture}.rope.{key}": value for key, value in keys.items()}
    file.tensors |= {name: StoredTensor.of(np.array(numbers, np.float32)) for name, numbers in tensors.items()}
    return Conversion.plan(file.write(tmp_path / "case.gguf")).config


def frequencies(config: Any, length: int) -> tuple[torch.Tensor, float]:
    """As transformers computes them for a text of that length."""
    made = transformers.AutoConfig.for_model(**config)
    kind = made.rope_parameters["rope_type"]
    inverse, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](made, torch.device("cpu"), length)
    return inverse, scale


@pytest.mark.parametrize("theta", choice([10_000.0, 500_000.0], in_ci=[500_000.0]))
@pytest.mark.parametrize("original", choice([8192, 64, 4096, 1000], in_ci=[8192, 1000]))
@pytest.mark.parametrize(("factor", "low", "high"), [(8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (16.0, 1.0, 8.0)])
def test_llama3_has_the_same_frequencies(
    factor: float, low: float, high: float, original: int, theta: float, tmp_path: Path
) -> None:
    count = 32
    wide = {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    file = tiny_gguf("llama", tiny_model("llama", **wide))
    numbers = np.array(llama3_factors(factor, low, high, original, count, theta), np.float32)
    file.tensors["rope_freqs.weight"] = StoredTensor.of(numbers)
    config = Conversion.plan(file.write(tmp_path / "case.gguf")).config
    plain = 1.0 / (theta ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    if config["rope_parameters"]["rope_type"] == "default":
        assert (numbers == 1.0).all()
        return
    made, scale = frequencies(config, 100)
    assert scale == 1.0
    torch.testing.assert_close(made, plain / torch.from_numpy(numbers), rtol=5e-6, atol=0.0)
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert config["rope_parameters"]["factor"] == factor


def test_other_factors_are_kept_exactly(tmp_path: Path) -> None:
    numbers = [1.0 + index % 3 for index in range(8)]
    config = parameters(tmp_path, "llama", {"rope_freqs.weight": numbers}, {})
    for length in (10, 1000):
        made, scale = frequencies(config, length)
        plain = 1.0 / (10_000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16))
        torch.testing.assert_close(made, plain / torch.tensor(numbers), rtol=1e-6, atol=0.0)
        assert scale == 1.0


@pytest.mark.parametrize("keys", [{}, {"scaling.type": "longrope"}])
def test_factors_of_short_and_long_texts(keys: dict[str, str], tmp_path: Path) -> None:
    short, long = [1.0 + index / 4 for index in range(8)], [2.0 + index for index in range(8)]
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    stated = {**keys, "scaling.original_context_length": 32, "scaling.attn_factor": 1.25}
    config = parameters(tmp_path, "phi3", tensors, stated)
    plain = 1.0 / (10_000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16))
    for length, factors in ((32, short), (33, long)):
        made, scale = frequencies(config, length)
        torch.testing.assert_close(made, plain / torch.tensor(factors), rtol=1e-6, atol=0.0)
        assert scale == 1.25
