"""Mixed steps on a GPU: the logits are the same with all fusions, captured or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.decoder.fusions import Fusions
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.fusion_choice import FusionChoice
from runner_svc.gpu.profiling_batch import batch_of
from runner_svc.gpu.step_buffers import PackedStep
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.step import StepBatch
from runner_svc.model.checkpoint.weights import load_weights
from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.config_file import read_config
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.device import GpuDevice
from runner_svc.gpu.launchers import CudaLaunchers  # imports CuPy

BF16 = torch.bfloat16
SLOTS, CONTEXT, TOKENS = 40, 512, 1024


def make_steps(family: str, folder: Path, sizes: dict[str, int]) -> CudaSteps:
    """Returns steps over a cache of noise, with different blocks and tokens for each slot."""
    folder = make_tiny_model(family, folder, rounded_to=BF16, **sizes)
    config, device = ModelConfig.from_hugging_face(read_config(folder)), torch.device("cuda")
    weights = load_weights(folder, config, BF16, device, lambda what, share: None)
    launchers = CudaLaunchers(config, BF16)
    decoder = CudaDecoder(config, weights, launchers.decoder(fp8_cache=False), TOKENS)
    slots = DeviceSlots(SLOTS, CONTEXT, CONTEXT // 16, device)
    cache = KVCache(config, SLOTS * CONTEXT // 16, 16, BF16, device)
    steps = CudaSteps(decoder, cache, slots, launchers, num_slots=SLOTS, max_step_tokens=TOKENS, tail_words=1024)
    cache.data.normal_()
    slots.tokens.random_(NUM_TOKENS)
    slots.spread(CONTEXT, cache)
    return steps


def mixed_batch(rng: np.random.Generator) -> StepBatch:
    """Returns a batch in which most rows decode and some have chunks, in any order; all sample."""
    counts = rng.permutation([1] * (SLOTS - 5) + [int(rng.integers(2, 100)) for _ in range(3)] + [230, 128])
    starts = [int(rng.integers(0, CONTEXT - count + 1)) for count in counts]
    return batch_of(np.array(starts, np.int32), counts.astype(np.int32))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3", {"head_dim": 128}), ("llama", {}), ("llama-biases", {}), ("mistral", {"hidden_size": 384})],
)
def test_all_kinds_of_a_mixed_step_give_the_same_logits(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    steps = make_steps(family, tmp_path / "tiny", {"hidden_size": 256, "intermediate_size": 512, **sizes})
    batch, device = mixed_batch(np.random.default_rng(seed)), GpuDevice()
    logits: dict[str, torch.Tensor] = {}
    replays = []  # torch takes no more captures into a pool whose last one is gone
    for fusions in steps.mixed_fusions(TOKENS):
        for captured in (False, True):
            steps.fusions = FusionChoice({1: {fusions: 1.0}})
            with device.stream() as stream, torch.inference_mode():
                steps.packed.zero_()
                replay = device.capture(partial(run_captured, steps, device)) if captured else None
                replays.append(replay)
                packed = PackedStep(steps.layout, np.zeros(steps.layout.words, np.int32))
                step = steps.pack_mixed(packed, batch, TOKENS if captured else None)
                steps.packed.copy_(torch.from_numpy(packed.words))
                steps.logits.fill_(torch.nan)
                steps.run_mixed(stream, step, replay)
            device.synchronize()
            logits[f"{fusions.name}, captured: {captured}"] = steps.logits.clone()
    expected = logits.pop(f"{Fusions().name}, captured: False")
    assert len({tuple(row) for row in expected.tolist()}) == SLOTS
    for name, actual in logits.items():
        error = float((actual - expected).abs().max() / expected.std())
        assert error < 0.3, f"{name}: {error:.3f} of the standard deviation"  # NaN never passes


def run_captured(steps: CudaSteps, device: GpuDevice) -> None:
    steps.forward_mixed(device.current_stream(), TOKENS)
