"""Plain checkpoints that are quantized while they are loaded, and heads in FP8."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from runner_svc.backends.decoder_loading import load_decoder
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.decoder import cpu_decoder
from runner_svc.interface.backend import Backend
from runner_svc.model.checkpoint.weights import load_weights, weights_fingerprint
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.folder.config_file import read_config
from runner_svc.weights import cpu_products
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.model_weights import MlpWeights, ModelWeights
from runner_svc.weights.on_load import NOTHING, OnLoad
from tests.support.greedy_driver import RandomDriver
from tests.support.host_backend import host_backend, no_progress
from tests.support.parity import Parity, Precision
from tests.support.thoroughness import choice
from tests.support.tiny_models import KERNEL_SIZES, NUM_TOKENS, make_tiny_model
from tests.support.tiny_quantized import make_tiny_quantized

CPU = torch.device("cpu")
# See test_quantized.
ROUNDED = Precision(torch.float32, 0.15, 0.3, relative=True, few=3, rate=0.1)


def load(folder: Path, on_load: OnLoad = NOTHING) -> TorchBackend:
    sizes: dict[str, Any] = {"num_blocks": 80, "block_size": 8, "num_slots": 4, "max_step_tokens": 128}
    return TorchBackend.load(
        str(folder), cache_folder=folder / "unused", progress=no_progress, on_load=on_load, **sizes
    )


def weights_of(folder: Path, on_load: OnLoad = NOTHING, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder, ModelConfig.from_hugging_face(read_config(folder)), dtype, CPU, no_progress, on_load)


@pytest.mark.parametrize("quantization", choice(["fp8", "fp8-block", "int4"], in_ci=["fp8", "int4"]))
def test_weights_are_quantized_while_they_are_loaded(quantization: str, tmp_path: Path) -> None:
    plain = make_tiny_model("llama-biases", tmp_path / "plain")
    on_load = OnLoad(quantization)
    for before, after in zip(weights_of(plain).layers, weights_of(plain, on_load).layers, strict=True):
        assert isinstance(before.mlp, MlpWeights) and isinstance(after.mlp, MlpWeights)
        for old, new in (
            (before.qkv, after.qkv),
            (before.output, after.output),
            (before.mlp.gate_up, after.mlp.gate_up),
            (before.mlp.down, after.mlp.down),
        ):
            assert new.size == old.size and new.matrix.num_bytes < old.matrix.num_bytes / 3
            assert new.bias is not None and old.bias is not None and torch.equal(new.bias, old.bias)
            error = (new.matrix.dequantized() - old.weight).norm() / old.weight.norm()
            assert 0 < error < {"fp8": 0.03, "fp8-block": 0.03, "int4": 0.12}[quantization]
            with pytest.raises(TypeError, match="a plain matrix is needed"):
                new.weight  # noqa: B018
    backends = [load(plain), load(plain, on_load), load(plain, OnLoad(quantization, head=True))]
    assert len({backend.model.weights_version for backend in backends}) == 3
    formats = [backend.model.weight_formats for backend in backends]
    assert formats == ["", f"{quantization} on load", f"{quantization} with head in fp8 on load"]
    assert len(RandomDriver(backends[1], random.Random(1)).generate([[1, 2, 3]], 4, 2)[0]) == 4


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    folder, _ = make_tiny_quantized("packed", "llama", tmp_path, has_head=True)
    assert "groups of 32" in load(folder).model.weight_formats
    with pytest.raises(UnsupportedModel, match="quantized already \\(compressed-tensors\\)"):
        load(folder, OnLoad("fp8"))
    with pytest.raises(UnsupportedModel, match="head is quantized already"):
        load(folder, OnLoad(head=True))


def test_rows_are_moved_before_they_become_blocks(tmp_path: Path) -> None:
    folder = make_tiny_model("cohere", tmp_path / "m", num_hidden_layers=1)
    plain, quantized = (next(weights_of(folder, OnLoad(name)).layers).qkv.matrix for name in ("none", "fp8-block"))
    assert isinstance(quantized, Fp8Matrix) and quantized.block == (128, 128)
    error = (quantized.dequantized() - plain.dequantized()).norm() / plain.dequantized().norm()
    assert 0 < error < 0.03


def test_plain_weights_keep_the_version_that_they_had_before_there_were_formats(tmp_path: Path) -> None:
    """Upgraded runners join those that are not."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4)
    assert weights_fingerprint(tmp_path, torch.bfloat16) == "e7323f009ae2e126e8d93867bf467f67"


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_the_head_is_held_in_fp8_and_the_embeddings_stay(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / family)
    plain, quantized = weights_of(folder), weights_of(folder, OnLoad(head=True))
    head = quantized.head.matrix
    assert isinstance(head, Fp8Matrix) and head.size == plain.head.size
    assert torch.equal(quantized.embeddings, plain.embeddings)
    error = (head.dequantized() - plain.head.weight).norm() / plain.head.weight.norm()
    assert 0 < error < 0.03
    prompt = [[3, 1, 4, 1, 5]]
    makers: list[Callable[[Path], Backend]] = [
        lambda path: load(path, OnLoad(head=True)),
        lambda path: host_backend(
            path, num_slots=2, block_size=8, max_step_tokens=16, num_blocks=8, on_load=OnLoad(head=True)
        ),
    ]
    streams = [RandomDriver(make(folder), random.Random(1)).generate(prompt, 6, 3) for make in makers]
    assert streams[0] == streams[1]


@pytest.mark.parametrize("kind", choice(["compressed-fp8-token", "gptq", "packed", "modelopt"], in_ci=["gptq"]))
@pytest.mark.parametrize("on_host", [False, True])
def test_a_checkpoints_quantized_head(
    kind: str, on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(cpu_decoder, "MAX_PLAIN_WEIGHTS", rng.choice([0, cpu_decoder.MAX_PLAIN_WEIGHTS]))
    monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: False)
    sizes = KERNEL_SIZES["llama"] if on_host else {}
    folder, model = make_tiny_quantized(kind, "llama", tmp_path, seed, has_head=True, vocab_size=264, **sizes)
    parity = Parity(model, ROUNDED)
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 20))] for _ in range(2)]
    backend = (
        host_backend(folder, num_slots=4, block_size=16, max_step_tokens=64, num_blocks=16) if on_host else load(folder)
    )
    parity.check(prompts, RandomDriver(backend, rng).generate(prompts, 6, 20), 6)
    parity.assert_few_ties()


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_small_models_quantized_head_is_as_exact_as_its_layers(
    bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to bfloat16, a logit would err by 0.3%, and more than one token could share the largest."""
    monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: bfloat16)
    folder, model = make_tiny_quantized("gptq", "llama", tmp_path, has_head=True, vocab_size=272)
    decoder = load_decoder(folder, "auto", no_progress)
    hidden = torch.randn(3, model.config.hidden_size)
    with torch.inference_mode():
        expected = model.lm_head(model.model.norm(hidden))
        torch.testing.assert_close(decoder.logits(hidden), expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_loading_never_holds_a_plain_model(tmp_path: Path) -> None:
    """At most: the quantized model, the plain matrix that is being quantized, and float32 copies of some rows."""
    folder = make_tiny_model("llama", tmp_path / "m", hidden_size=256, intermediate_size=512, num_hidden_layers=12)
    config = ModelConfig.from_hugging_face(read_config(folder))
    plain = 2 * config.num_layer_weights
    largest = 256 * 512
    for quantization, size in (("fp8", 1.02), ("int4", 0.54)):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            held = list(weights_of(folder, OnLoad(quantization), torch.bfloat16).layers)
        assert len(held) == config.num_layers
        peak = peak_bytes(profiled) - (folder / "model.safetensors").stat().st_size  # which is mapped
        print(quantization, peak, plain)
        ends = 2 * 2 * config.vocab_size * config.hidden_size
        assert peak < ends + size * config.num_layer_weights + 16 * largest + 200_000, (quantization, peak)
        assert peak < 0.8 * plain


def peak_bytes(profiled: Any) -> int:
    """Returns the most bytes that tensors held at once."""
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profiled.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak
