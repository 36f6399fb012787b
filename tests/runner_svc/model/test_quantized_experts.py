"""Experts in the formats of checkpoints give the greedy tokens of transformers' model with their numbers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.decoder import cpu_decoder
from runner_svc.decoder.mlp import ExpertMlp, route
from runner_svc.gpu.loading import check_experts
from runner_svc.model.checkpoint.servable import why_not
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.experts_config import ExpertsConfig, RouterConfig
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights.expert_matrices import ExpertMatrices
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.fp8_matrix import to_fp8
from runner_svc.weights.int4_matrix import to_int4
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import host_backend, no_progress
from tests.support.parity import FLOAT32, ROUNDED, Parity
from tests.support.thoroughness import choice
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS
from tests.support.tiny_mxfp4 import make_tiny_mxfp4
from tests.support.tiny_quantized import make_tiny_quantized

CASES = [
    ("mxfp4", "gpt-oss"),
    ("awq", "qwen3-moe"),
    ("packed-asymmetric", "mixtral"),
    ("compressed-fp8-weights", "qwen2-moe"),
    ("packed", "glm4-moe"),
    ("gptq", "mixtral"),
]
MAX_TOKENS = 8


def make(kind: str, family: str, folder: Path, seed: int = 0, **sizes: Any) -> tuple[Path, Any]:
    if kind == "mxfp4":
        return make_tiny_mxfp4(folder, seed, **sizes)
    return make_tiny_quantized(kind, family, folder, seed, **sizes)


def load(folder: Path) -> TorchBackend:
    sizes: dict[str, Any] = {"num_blocks": 32, "block_size": 16, "num_slots": 2, "max_step_tokens": 64}
    return TorchBackend.load(str(folder), cache_folder=folder / "unused", progress=no_progress, **sizes)


@pytest.mark.parametrize(("kind", "family"), choice(CASES, in_ci=CASES[:2]))
def test_greedy_tokens(kind: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    case = rng.choice(["plain", "kept", "host"])
    print(f"seed {seed}, {case}")
    monkeypatch.setattr(cpu_decoder, "MAX_PLAIN_WEIGHTS", 2**28 if case == "plain" else 0)
    folder, model = make(kind, family, tmp_path, seed, **(KERNEL_SIZES[family] if case == "host" else {}))
    assert why_not(folder) is None
    backend: Any
    if case == "host":
        backend = host_backend(folder, num_blocks=32, block_size=16, num_slots=2, max_step_tokens=64)
    else:
        backend = load(folder)
        assert backend.model.weight_formats
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(length)] for length in (5, 40)]
    parity = Parity(model, ROUNDED if case == "kept" else FLOAT32)
    parity.check(prompts, RandomDriver(backend, rng).generate(prompts, MAX_TOKENS, 30), MAX_TOKENS)
    parity.assert_few_ties()


@pytest.mark.parametrize("kind", ["fp8", "int4", "unlike"])
def test_each_expert_rounds_its_own_rows(kind: str) -> None:
    torch.manual_seed(0)
    config = ExpertsConfig(4, 2, 64, RouterConfig(), activation="silu")

    def quantized(weight: torch.Tensor, index: int) -> Matrix:
        return to_int4(weight, 32) if kind == "int4" or (kind == "unlike" and index == 2) else to_fp8(weight)

    stacks = [
        ExpertMatrices.of_each([quantized(torch.randn(rows, columns) / 8, index) for index in range(4)])
        for rows, columns in ((128, 96), (96, 64))
    ]
    gate_up, down = stacks
    assert [stack.whole is None for stack in stacks] == [kind == "unlike"] * 2
    weights = ExpertWeights(LinearWeights.plain(torch.randn(4, 96)), gate_up, None, down, None)
    x = torch.randn(9, 96)
    experts, factors = route(x @ weights.router.weight.t(), config)
    expected = torch.zeros(9, 96)
    for row in range(9):
        for expert, factor in zip(experts[row].tolist(), factors[row], strict=True):
            gate, up = gate_up.matrices[expert].twin(x[row : row + 1]).chunk(2, dim=-1)
            inner = torch.nn.functional.silu(gate) * up
            expected[row] += factor * down.matrices[expert].twin(inner)[0]
    for keep_plain in (True, False):
        got = ExpertMlp(config, weights, keep_plain=keep_plain)(x)
        # Activations may be rounded either way, by the last bit of a sum.
        assert (got - expected).norm() <= 0.02 * expected.norm()
    with pytest.raises(TypeError, match=r"plain matrices of experts are needed, not ones in (FP8|int4)"):
        weights.gate_up.weight  # noqa: B018
    plain = gate_up.dequantized(torch.bfloat16)
    assert plain.format == "bfloat16" and plain.weight.shape == (4, 128, 96) and plain.dequantized(torch.half) is plain
    for index in range(4):
        assert torch.equal(plain.weight[index], gate_up.matrices[index].dequantized().bfloat16())
    order = torch.randperm(128)
    for moved, matrix in zip(gate_up.reordered(order).matrices, gate_up.matrices, strict=True):
        assert torch.equal(moved.dequantized(), matrix.dequantized()[order])


def test_experts_that_a_gpu_has_no_room_for_are_refused(tmp_path: Path) -> None:
    folder, _ = make_tiny_mxfp4(tmp_path, num_hidden_layers=1)
    config = ModelConfig.from_hugging_face(read_config(folder))
    assert config.experts is not None
    needed = 2 * 6 * 3 * config.experts.width * config.hidden_size
    check_experts(config, torch.bfloat16, needed)
    check_experts(replace(config, quantization=None), torch.bfloat16, 0)
    with pytest.raises(UnsupportedModel, match=r"quantized \(mxfp4\), and a GPU computes experts in bfloat16 so far"):
        check_experts(config, torch.bfloat16, needed - 1)


def test_routers_and_gates_are_plain(tmp_path: Path) -> None:
    """Also where the configuration does not leave them out; quantized ones are refused."""
    folder, _ = make("compressed-fp8-weights", "qwen2-moe", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*layers\\.1\\.mlp\\.down_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    assert why_not(folder) is None
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.0.mlp.gate", "model.layers.1.mlp.shared_expert_gate"):
        codes = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
        scales = {f"{name}.weight_scale": torch.ones(1)}
        save_file({**tensors, f"{name}.weight": codes}, folder / "model.safetensors", {"format": "pt"})
        assert (told := why_not(folder)) is not None and f"'{name}.weight' has dtype F8_E4M3" in told
        save_file({**tensors, f"{name}.weight": codes, **scales}, folder / "model.safetensors", {"format": "pt"})
        assert (told := why_not(folder)) is not None and f"{name!r} is quantized" in told


def test_what_is_not_mxfp4_as_it_says_is_refused(tmp_path: Path) -> None:
    folder, _ = make_tiny_mxfp4(tmp_path, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    scales = tensors[f"{name}_scales"].clone()
    scales[1, 2, 0] = 255
    save_file({**tensors, f"{name}_scales": scales}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match="down_proj_scales has a scale that is not a number"):
        load(folder)
    save_file(
        {**tensors, f"{name}_scales": scales[:, :-1].contiguous()}, folder / "model.safetensors", {"format": "pt"}
    )
    assert (told := why_not(folder)) is not None and f"{name}_scales' is (6, " in told
    del tensors[f"{name}_scales"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert (told := why_not(folder)) is not None and f"no tensor '{name}_scales'" in told
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert (told := why_not(folder)) is not None and "experts.gate_up_proj'" in told
