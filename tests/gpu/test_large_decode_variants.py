"""Decode passes of more rows than the skinny products support: every way to launch one gives the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.capture import prepare_decode
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.config_file import read_config
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.module import is_hopper
from runner_svc.gpu.launchers import CudaLaunchers  # imports CuPy

BF16 = torch.bfloat16
ROWS, CONTEXT = 150, 64


def current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize(("family", "sizes"), [("qwen3", {"head_dim": 128}), ("llama", {})])
def test_all_ways_give_the_same_logits(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, **sizes}
    folder = make_tiny_model(family, tmp_path / "tiny", rounded_to=BF16, **sizes)
    config, device = ModelConfig.from_hugging_face(read_config(folder)), torch.device("cuda")
    weights = load_weights(folder, config, BF16, device, lambda what, share: None)
    launchers = CudaLaunchers(config, BF16, skinny_blocks=())
    decoder = CudaDecoder(config, weights, launchers.decoder(fp8_cache=False), ROWS)
    slots = DeviceSlots(ROWS, CONTEXT, CONTEXT // 16, device)
    cache = KVCache(config, ROWS * CONTEXT // 16, 16, BF16, device)
    steps = CudaSteps(decoder, cache, slots, launchers, num_slots=ROWS, max_step_tokens=ROWS, tail_words=1024)
    cache.data.normal_()
    slots.tokens.random_(NUM_TOKENS)
    slots.spread(CONTEXT, cache)
    prepare_decode(steps, CONTEXT, ROWS, ROWS)
    logits: dict[str, torch.Tensor] = {}
    for variant in steps.decode_variants(current_stream, ROWS):
        steps.logits.fill_(torch.nan)
        variant.launch()
        logits[variant.name] = steps.logits[:ROWS].clone()
    assert len(logits) == (3 if is_hopper() else 2)
    expected = logits.pop("cuBLAS")
    assert len({tuple(row) for row in expected.tolist()}) == ROWS
    for name, actual in logits.items():
        error = float((actual - expected).abs().max() / expected.std())
        assert error < 0.3, f"{name}: {error:.3f} of the standard deviation"  # NaN never passes
