"""The deterministic mode of a GPU on the CPU: its pass, what it refuses, what its bits depend on."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roster_common.setting_sources import UnusableSettings
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.cuda.canonical.log_softmax import largest_ids
from runner_svc.cuda.products.skinny_variant import SkinnyVariant, canonical_parts
from runner_svc.gpu.canonical import determinism
from runner_svc.gpu.canonical.check import Checked, ProductCheck
from runner_svc.gpu.canonical.decoder import CanonicalDecoder
from runner_svc.interface.products.canonical_launchers import NormedRows
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.config_file import read_config
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup import backend_factory
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import host_backend, no_progress
from tests.support.host_canonical import HostCanonical
from tests.support.thoroughness import choice
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "family",
    choice(
        ["llama", "qwen3", "llama-tied", "qwen3-moe", "mixtral", "qwen2", "llama-biases"],
        in_ci=["qwen3", "qwen3-moe", "llama-biases"],
    ),
)
def test_the_pass_gives_the_torch_backends_tokens(family: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, folder = random.Random(seed), make_tiny_model(family, tmp_path / "tiny")
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 30))] for _ in range(4)]
    sizes: dict[str, Any] = {"num_slots": 4, "block_size": 8, "max_step_tokens": 40, "num_blocks": 48}
    backend = host_backend(folder, canonical=True, **sizes)
    backend.cache.data.fill_(torch.nan)
    assert isinstance(backend.decoder, CanonicalDecoder)
    expected = TorchBackend.load(str(folder), cache_folder=folder / "unused", progress=no_progress, **sizes)
    assert RandomDriver(backend, rng).generate(prompts, 8, 12) == RandomDriver(expected, rng).generate(prompts, 8, 12)


REFUSED = {
    "gemma": "only models with Llama's norms",
    "granite": "only models with Llama's norms",
    "qwen2-moe": "only models with Llama's norms",
    "gpt-oss": "experts with biases",
    "llama-dynamic": "dynamic RoPE",
}


def test_what_has_no_order_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "is_hopper", lambda: True)

    def config(family: str) -> ModelConfig:
        folder = make_tiny_model(family, tmp_path / family, hidden_size=128, intermediate_size=128)
        return ModelConfig.from_hugging_face(read_config(folder))

    llama = replace(config("llama"), head_dim=64)
    assert determinism.refusal(llama, "", BF16, 16) == ""
    assert not any(determinism.refusal(config(family), "", BF16, 16) for family in ("qwen2", "mixtral"))
    assert "quantized mixtures of experts (fp8 on" in determinism.refusal(config("mixtral"), "fp8 on load", BF16, 16)
    for family, says in REFUSED.items():
        assert says in determinism.refusal(config(family), "", BF16, 16), family
    assert "transformers computes" in determinism.refusal(None, "", BF16, 16)
    assert "heads of 256" in determinism.refusal(replace(llama, head_dim=256), "", BF16, 16)
    assert "multiples of 64" in determinism.refusal(replace(llama, hidden_size=72), "", BF16, 16)
    assert determinism.refusal(llama, "fp8-block on load", BF16, 16) == ""
    assert determinism.refusal(llama, "FP8 per channel, activations per token; FP8 per tensor", BF16, 16) == ""
    assert "quantized (int4 on load)" in determinism.refusal(llama, "int4 on load", BF16, 16)
    assert "quantized (FP8 per" in determinism.refusal(llama, "FP8 per channel; MXFP4", BF16, 16)
    assert "set dtype to 'bfloat16'" in determinism.refusal(llama, "", torch.float16, 16)
    assert "does not divide 256" in determinism.refusal(llama, "", BF16, 48)
    assert "draft is 'medusa:x'" in determinism.refusal(llama, "", BF16, 16, "medusa:x")
    assert determinism.refusal(llama, "", BF16, 16, "ngram") == ""
    monkeypatch.setattr(determinism, "is_hopper", lambda: False)
    assert "compute capability 9.0" in determinism.refusal(llama, "", BF16, 16)


def test_a_product_whose_bits_depend_on_the_rows_is_refused() -> None:
    class Fault(HostCanonical):
        def store(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> None:
            super().store(stream, x, matrix, out, bias)
            if len(out) == 30:
                out[-1, -1] *= 1.0 + 2.0**-7

    config = ModelConfig.from_hugging_face({**_TINY, "architectures": ["LlamaForCausalLM"]})
    matrices = [LinearWeights.plain(torch.randn(rows, 64).to(BF16)) for rows in (128, 64, 128, 64, 96)]
    check = (0, 130, torch.device("cpu"))
    digest = ProductCheck(HostCanonical(config), *check).digest(Checked(*matrices))
    assert digest == ProductCheck(HostCanonical(config), *check).digest(Checked(*matrices))
    with pytest.raises(UnusableSettings, match=r"the bits of the QKV product depend on the number of rows \(30 differ"):
        ProductCheck(Fault(config), *check).digest(Checked(*matrices))


_TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def test_equal_values_are_ordered_by_id() -> None:
    values = torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.5, -torch.inf], [-3.0, -3.0, -2.0, -3.0, -2.0, -3.0]])
    assert largest_ids(values, 4).tolist() == [[1, 3, 0, 4], [2, 4, 0, 1]]


def test_parts_depend_on_the_matrix_alone() -> None:
    assert [canonical_parts(*size) for size in ((28672, 4096), (6144, 4096), (4096, 14336), (4096, 64))] == [1, 2, 2, 1]
    for size in ((6144, 4096), (28672, 4096)):
        assert {SkinnyVariant.choose_canonical(rows, *size).split for rows in (1, 9, 100, 4000)} == {
            canonical_parts(*size)
        }
    assert [SkinnyVariant.choose_canonical(rows, 28672, 4096).grid(28672, tiles, 132) for rows, tiles in (
        (1, 1), (300, 3), (512, 4)
    )] == [132, 132, 132]  # fmt: skip


def test_the_setting_reaches_a_gpu_and_no_test_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunnerSettings.read(deterministic=True)
    assert backend_factory._gpu_options(settings).deterministic
    asked: list[RunnerSettings] = []
    monkeypatch.setattr(backend_factory, "_gpu_backend", lambda settings, *_: asked.append(settings))
    backend_factory.build_backend(settings, "cuda", no_progress)
    assert asked == [settings]
    with pytest.raises(UnusableSettings, match="'hash' is a test backend"):
        backend_factory.build_backend(settings, "hash", no_progress)
