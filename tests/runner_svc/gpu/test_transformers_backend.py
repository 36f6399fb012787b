"""The CUDA backend's host code over models of transformers gives the tokens of `generate`, captured or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from runner_svc.gpu.backend import CudaBackend
from tests.support.host_device import HostDevice
from tests.support.host_transformers import UncapturableDevice, host_transformers, poisoned
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
