"""The host's launchers of experts pass what the kernels have to pass on a GPU, and the MLP made of them is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from runner_svc.cuda.products.by_class import LinearProducts
from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.decoder.cuda_experts import CudaExpertMlp, ExpertSpace
from runner_svc.decoder.fusions import Activating
from runner_svc.decoder.hidden import Hidden
from runner_svc.decoder.mlp import ExpertMlp
from runner_svc.gpu.capture import prepare_decode
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.experts_config import ExpertsConfig, RouterConfig
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights.expert_matrices import ExpertMatrices
from runner_svc.weights.expert_weights import ExpertWeights, SharedExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from tests.support.expert_cases import ERNIE, GPT_OSS, GROUPED, QWEN, ExpertCase, ExpertTensors
from tests.support.expert_runs import EPS, run, run_entry
from tests.support.host_device import HostLaunchers
from tests.support.host_experts import HostEntry, HostExpertProducts, HostExpertRows, HostRouting, host_experts
from tests.support.host_layers import HostActivation
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("job_rows", [8, 16])
@pytest.mark.parametrize("rows", [1, 8, 9, 50])
@pytest.mark.parametrize("config", [QWEN, GPT_OSS, ERNIE, GROUPED], ids=["qwen", "gpt-oss", "ernie", "grouped"])
def test_launchers(config: ExpertsConfig, rows: int, job_rows: int) -> None:
    tensors = ExpertTensors(ExpertCase(config, rows, extra_logits=1), CPU, 0)
    run(tensors, HostRouting(config), HostExpertRows(config), HostExpertProducts(config, job_rows))


@pytest.mark.parametrize("config", [QWEN, ERNIE], ids=["qwen", "ernie"])
def test_entry(config: ExpertsConfig) -> None:
    run_entry(ExpertTensors(ExpertCase(config, 37), CPU, 0), HostEntry(config), HostExpertRows(config), 160)


NAMES = ["qwen", "gpt-oss", "shared", "ernie", "grouped"]
SHARED = ExpertsConfig(8, 2, 64, RouterConfig(), activation="silu", shared_width=64)


@pytest.mark.parametrize("activating", Activating)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("config", [QWEN, GPT_OSS, SHARED, ERNIE, GROUPED], ids=NAMES)
def test_mlp_of_a_gpu_is_that_of_the_cpu(config: ExpertsConfig, rows: int, adds: bool, activating: Activating) -> None:
    tensors = ExpertTensors(ExpertCase(config, rows, dtype=torch.float32), CPU, 0)
    router = torch.randn(config.num_experts, 128)
    shared = None
    if config.shared_width is not None:
        gate_up, down = torch.randn(2 * config.shared_width, 128) / 11, torch.randn(128, config.shared_width) / 8
        gate = torch.randn(1, 128) if config.shared_gate else None
        shared = SharedExpertWeights(LinearWeights.plain(gate_up), LinearWeights.plain(down), gate)
    weights = ExpertWeights(
        LinearWeights.plain(router, tensors.router_bias if config.bias else None),
        ExpertMatrices.plain(tensors.gate_up),
        tensors.gate_up_bias,
        ExpertMatrices.plain(tensors.down),
        tensors.down_bias,
        shared,
        tensors.router_bias if config.router.is_corrected else None,
    )
    space = ExpertSpace(config, 128, 40, torch.float32, CPU)
    activation = HostActivation("silu")
    mlp = CudaExpertMlp(config, weights, host_experts(config, activation), space, LinearProducts({}))
    residual, last = torch.randn(rows, 128), torch.full((rows, 128), torch.nan)
    hidden = Hidden(residual.clone(), None if adds else last)
    mlp(0, tensors.x, hidden, activating)
    got = hidden.residual - residual if adds else last
    expected = ExpertMlp(config, weights, keep_plain=False)(tensors.x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_entered_experts_are_those_after_a_norm() -> None:
    config, rows = QWEN, 70
    tensors = ExpertTensors(ExpertCase(config, rows, dtype=torch.float32), CPU, 0)
    weights = ExpertWeights(
        LinearWeights.plain(torch.randn(config.num_experts, 128)),
        ExpertMatrices.plain(tensors.gate_up),
        None,
        ExpertMatrices.plain(tensors.down),
        None,
    )
    mlp = CudaExpertMlp(
        config, weights, host_experts(config), ExpertSpace(config, 128, rows, torch.float32, CPU), LinearProducts({})
    )
    own = Activating.GATHERING_PRODUCT
    assert mlp.enters(rows, own)
    assert not mlp.enters(rows, Activating.PRODUCT)
    assert not mlp.enters(32, own)
    assert not mlp.enters(513, own)
    norm, next_norm = torch.rand(128) + 0.5, torch.rand(128) + 0.5
    entered, apart, normed = torch.ones(rows, 128), torch.ones(rows, 128) + tensors.x, torch.empty(rows, 128)
    mlp.enter_and_norm(0, tensors.x, entered, norm, normed, next_norm, EPS)
    rows_after_norm = functional.rms_norm(apart, (128,), norm, EPS)
    mlp.add_to_normed(0, rows_after_norm, apart, next_norm, EPS, own)
    torch.testing.assert_close(entered, apart)
    torch.testing.assert_close(normed, rows_after_norm)


def test_a_pass_that_enters_its_experts_has_the_logits_of_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, context = 40, 32
    folder = make_tiny_model("mixtral", tmp_path / "tiny")
    config = ModelConfig.from_hugging_face(read_config(folder))
    weights = load_weights(folder, config, torch.float32, CPU, lambda what, share: None)
    launchers = HostLaunchers(config)
    decoder = CudaDecoder(config, weights, launchers.decoder(fp8_cache=False), rows)
    slots = DeviceSlots(rows, context, context // 16, CPU)
    cache = KVCache(config, rows * context // 16, 16, torch.float32, CPU)
    steps = CudaSteps(decoder, cache, slots, launchers, num_slots=rows, max_step_tokens=rows, tail_words=1024)
    cache.data.normal_()
    slots.tokens.random_(NUM_TOKENS)
    slots.spread(context, cache)
    prepare_decode(steps, context, rows, rows)
    entered: list[int] = []
    enter = CudaExpertMlp.enter_and_norm

    def noted(*arguments: Any) -> None:
        entered.append(1)
        enter(*arguments)

    monkeypatch.setattr(CudaExpertMlp, "enter_and_norm", noted)
    (variant,) = [one for one in steps.decode_variants(lambda: 0, rows) if "gathering" in one.name]
    variant.launch()
    logits = steps.logits[:rows].clone()
    assert len(entered) == config.num_layers - 1 > 0
    monkeypatch.setattr(CudaExpertMlp, "enters", lambda *arguments: False)
    variant.launch()
    assert len(entered) == config.num_layers - 1
    torch.testing.assert_close(logits, steps.logits[:rows], rtol=1e-4, atol=1e-4)
