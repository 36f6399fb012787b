"""The CUDA backend's host code over models of transformers gives the tokens of `generate`, captured or not."""

from __future__ import annotations

import unittest.mock
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from runner_svc.gpu.backend import CudaBackend
from runner_svc.transformers_decoder.gpu.swapped_rotation import RotationLauncher, swap_rotation
from tests.support.host_device import HostDevice
from tests.support.host_transformers import UncapturableDevice, host_rotation, host_transformers, poisoned
from tests.support.thoroughness import choice
from tests.support.transformers_models import make_tiny
from tests.support.transformers_sweep import BLOCK_SIZE, serve_folder

CASES = [
    ("llama", "LlamaForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gpt_oss", "GptOssForCausalLM"),
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("qwen3_moe", "Qwen3MoeForCausalLM"),
    ("olmo2", "Olmo2ForCausalLM"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(device: HostDevice, folder: Path, *, num_blocks: int) -> CudaBackend:
    backend = host_transformers(folder, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=device)
    poisoned(backend.cache.data)
    del backend.model.eos_token_ids[:]
    return backend


@pytest.mark.parametrize(("model_type", "name"), choice(CASES, in_ci=CASES[:3]))
def test_tokens_are_those_of_generate(model_type: str, name: str, tmp_path: Path) -> None:
    device = HostDevice(mixed_graphs=True)
    verdict = serve_folder(model_type, name, make_tiny(model_type, name, tmp_path), loader=partial(load, device))
    assert (verdict.outcome, verdict.why) == ("works", "")
    assert device.replays > 10


def test_a_pass_that_can_t_be_captured_is_launched(tmp_path: Path) -> None:
    model_type, name = CASES[0]
    device = UncapturableDevice()
    verdict = serve_folder(model_type, name, make_tiny(model_type, name, tmp_path), loader=partial(load, device))
    assert (verdict.outcome, verdict.why) == ("works", "")


def test_a_swapped_rotation_leaves_other_types_to_the_function_that_was_there() -> None:
    def make(heads: int, kv_heads: int, head_dim: int) -> RotationLauncher:
        return host_rotation

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=8)
    )
    assert swap_rotation(model, make, lambda: 0, torch.float32) == 1
    rotation = modeling_llama.apply_rotary_pos_emb
    for dtype, calls in ((torch.float32, 1), (torch.float64, 0)):
        q, k, angles = (torch.randn(1, heads, 3, 16, dtype=dtype) for heads in (4, 2, 1))
        with unittest.mock.patch.object(rotation, "original", wraps=rotation.original) as original:
            found = rotation(q, k, angles[:, 0].cos(), angles[:, 0].sin())
        assert original.call_count == 1 - calls
        expected = rotation.original(q, k, angles[:, 0].cos(), angles[:, 0].sin())
        torch.testing.assert_close(found, expected)
