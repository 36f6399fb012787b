"""Scales of an FP8 cache: their values for given magnitudes, and the deviation of a model with such a cache."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runner_svc.execution.runner import Runner
from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.kv_scales import HEADROOM, LARGEST_E4M3, scales_for
from runner_svc.interface.kv_cache import FP8
from runner_svc.interface.pool_size import MemoryProfile
from runner_svc.model.checkpoint.servable import why_not
from runner_svc.model.errors import UnsupportedModel
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.plans import SAMPLE, admission, plan, sampling
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS, make_tiny_model
from tests.support.tiny_quantized import make_tiny_quantized

BLOCK_SIZE = 8


def test_scales_are_the_least_powers_of_two_that_leave_room() -> None:
    largest = torch.cat((torch.rand(100) * 1000, torch.tensor([1e-4, 224.0, 225.0])))
    scales = scales_for(largest)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    assert bool((largest * HEADROOM <= scales * LARGEST_E4M3).all())
    assert bool((largest * HEADROOM > scales / 2 * LARGEST_E4M3).all())
    assert scales[-2:].tolist() == [1.0, 2.0]


def test_heads_of_zeros_or_nan_get_a_scale_of_one() -> None:
    assert scales_for(torch.tensor([0.0, torch.nan, torch.inf])).tolist() == [1.0, 1.0, 1.0]


def backend_of(folder: Path, *, fp8_cache: bool, num_blocks: int | None = 48) -> CudaBackend:
    return host_backend(
        folder,
        num_slots=5,
        block_size=BLOCK_SIZE,
        max_step_tokens=40,
        num_blocks=num_blocks,
        fp8_cache=fp8_cache,
        device=HostDevice(MemoryProfile(total=2 << 30, peak=1 << 20, other=1 << 20)),
    )


def prompt_logprobs(backend: CudaBackend, prompt: list[int]) -> np.ndarray:
    """Returns those of the tokens after the first, computed in two chunks, so that cached keys are read."""
    runner = Runner(backend)
    asks = sampling(prompt_logprobs=1)
    runner.execute(1, plan(admissions=[admission(1, prompt, [9, 3, 5, 7], sampling=asks)], extents=[(1, 0, 20, 0)]))
    result = runner.execute(2, plan(extents=[(1, 20, len(prompt) - 20, SAMPLE)]))
    return np.frombuffer(result.prompt_logprobs[0].values, np.float32)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_loses_little_in_an_fp8_cache(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / "tiny")
    rng = random.Random(3)
    prompt = [rng.randrange(NUM_TOKENS) for _ in range(30)]
    backend = backend_of(folder, fp8_cache=True)
    assert backend.cache.data.dtype is FP8
    assert backend.cache.scales is not None
    assert backend.cache.scales.shape == (3, 2, 2)
    backend.cache.data.view(torch.uint8).fill_(0x7F)  # NaN
    exact = prompt_logprobs(backend_of(folder, fp8_cache=False), prompt)
    error = np.abs(prompt_logprobs(backend, prompt) - exact).max() / exact.std()
    assert 0 < error < 0.25


@pytest.mark.parametrize("place", ["self_attn", "self_attn.{}_proj"])
def test_a_checkpoint_s_own_scales(place: str, tmp_path: Path) -> None:
    folder, _ = make_tiny_quantized(
        "compressed-fp8-weights", "llama", tmp_path, num_hidden_layers=2, **KERNEL_SIZES["llama"]
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "no tensor 'model.layers.0.self_attn.k_scale'" in str(why_not(folder))
    tensors = load_file(folder / "model.safetensors")
    for layer, pair in enumerate(((0.02, 0.03), (0.05, 0.01))):
        for kind, scale in zip("kv", pair, strict=True):
            name = f"model.layers.{layer}.{place.format(kind)}.{kind}_scale"
            tensors[name] = torch.tensor([scale], dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert why_not(folder) is None
    backend = backend_of(folder, fp8_cache=True)
    expected = torch.tensor([[0.02, 0.03], [0.05, 0.01]]).bfloat16().float()
    assert backend.cache.scales is not None and backend.cache.scales.shape == (2, 2, 2)
    assert torch.equal(backend.cache.scales, expected.unsqueeze(-1).expand(2, 2, 2))
    prompt = list(range(30))
    exact = prompt_logprobs(backend_of(folder, fp8_cache=False), prompt)
    error = np.abs(prompt_logprobs(backend, prompt) - exact).max() / exact.std()
    assert 0 < error < 0.25
    tensors["model.layers.1." + place.format("v") + ".v_scale"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"v_scale is 0\.0, not a positive number"):
        backend_of(folder, fp8_cache=False)


def test_an_fp8_pool_holds_more(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny")
    wide, narrow = (backend_of(folder, fp8_cache=fp8_cache, num_blocks=None) for fp8_cache in (False, True))
    assert narrow.num_blocks in range(4 * wide.num_blocks, 4 * wide.num_blocks + 4)  # float32 on a CPU
    copied = torch.arange(narrow.cache.data[:, :, 0].numel(), dtype=torch.uint8).view_as(narrow.cache.data[:, :, 0])
    narrow.cache.data.view(torch.uint8)[:, :, 5] = copied
    narrow.copy_blocks(np.array([5], np.int32), np.array([7], np.int32))
    assert torch.equal(narrow.cache.data.view(torch.uint8)[:, :, 7], copied)
