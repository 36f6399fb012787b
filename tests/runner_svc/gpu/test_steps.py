"""What is behind the last layer's attention of a mixed step is computed for the rows that sample alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from runner_svc.decoder.cuda_decoder import CudaDecoder
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
from tests.support.host_device import HostLaunchers
from tests.support.thoroughness import choice
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

CPU = torch.device("cpu")
SLOTS, CONTEXT, TOKENS = 6, 64, 96
FAMILIES = ["llama", "llama-biases", "cohere", "gemma2", "gpt2", "mixtral", "olmo2", "qwen2-moe"]


def make_steps(family: str, folder: Path) -> CudaSteps:
    """Returns steps over a cache of noise, with different blocks and tokens for each slot."""
    folder = make_tiny_model(family, folder)
    config = ModelConfig.from_hugging_face(read_config(folder))
    weights = load_weights(folder, config, torch.float32, CPU, lambda what, share: None)
    launchers = HostLaunchers(config)
    decoder = CudaDecoder(config, weights, launchers.decoder(fp8_cache=False), TOKENS)
    slots = DeviceSlots(SLOTS, CONTEXT, CONTEXT // 16, CPU)
    cache = KVCache(config, SLOTS * CONTEXT // 16, 16, torch.float32, CPU)
    steps = CudaSteps(decoder, cache, slots, launchers, num_slots=SLOTS, max_step_tokens=TOKENS, tail_words=1024)
    cache.data.normal_()
    slots.tokens.random_(NUM_TOKENS)
    slots.spread(CONTEXT, cache)
    return steps


def mixed_batch(sample: list[bool]) -> StepBatch:
    """Returns rows that decode and rows with chunks, of which those of `sample` sample."""
    batch = batch_of(np.array([7, 0, 30, 20, 0, 9], np.int32), np.array([1, 20, 1, 13, 40, 1], np.int32))
    return replace(batch, sample=np.array(sample))


@torch.inference_mode()
@pytest.mark.parametrize("family", choice(FAMILIES, in_ci=["cohere", "mixtral"]))
def test_few_rows_have_the_logits_of_all(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make_steps(family, tmp_path / "tiny")
    decoder, counts = steps._decoder, dict[int, int]()
    assert isinstance(decoder, CudaDecoder)
    follow = CudaDecoder._follow

    def noted(self: CudaDecoder, stream: int, index: int, *arguments: torch.Tensor) -> bool:
        counts[index] = len(arguments[3])
        return follow(self, stream, index, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaDecoder, "_follow", noted)
    last = decoder.config.num_layers - 1
    for fusions in steps.mixed_fusions(TOKENS):
        steps.fusions = FusionChoice({1: {fusions: 1.0}})
        for sample in ([True, False, True, True, False, True], [True] * 6, [False] * 6):
            packed = PackedStep(steps.layout, np.zeros(steps.layout.words, np.int32))
            step = steps.pack_mixed(packed, mixed_batch(sample))
            steps.packed.copy_(torch.from_numpy(packed.words))
            counts.clear()
            assert steps.run_mixed(0, step) is None
            few = steps.logits[: sum(sample)].clone()
            assert counts.pop(last, 0) == sum(sample)
            assert set(counts.values()) == {76}
            hidden = steps.run_mixed(0, replace(step, scores=True))
            assert hidden is not None and len(hidden.residual) == 76 == counts[last]
            torch.testing.assert_close(few, steps.logits[: sum(sample)], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_ends_of_any_number_of_rows_can_be_launched_beforehand(tmp_path: Path) -> None:
    steps = make_steps("llama", tmp_path / "tiny")
    seen: list[int] = []
    finish = steps._decoder.finish

    def noted(stream: int, num_tokens: int, fusions: object, rows: torch.Tensor) -> object:
        seen.append(len(rows))
        return finish(stream, num_tokens, fusions, rows)  # type: ignore[arg-type]

    steps._decoder.finish = noted  # type: ignore[method-assign, assignment]
    steps.finish_any(0)
    assert seen == [1, 2, 4, 6]
