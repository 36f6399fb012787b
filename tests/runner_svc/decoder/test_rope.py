"""cos, sin and rotation equal those of Llama in transformers, for each scaling type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from runner_svc.decoder.rope import RotaryEmbedding
from runner_svc.decoder.step_rotations import StepRotations, StepRows
from runner_svc.model.config import ModelConfig
from runner_svc.model.rope_config import RopeConfig, RopeType

CPU = torch.device("cpu")
MAX_POSITIONS = 128
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + index / 16 for index in range(16)],
        "long_factor": [2.0 + index / 2 for index in range(16)],
    },
    "longrope-attention-factor": {
        "original_max_position_embeddings": 32,
        "short_factor": [1.5 - index / 16 for index in range(16)],
        "long_factor": [3.0 + index / 3 for index in range(16)],
        "attention_factor": 1.3,
        "factor": 8.0,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-attention-factor": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.7},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn-not-truncated": {
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
}


def llama_config(scaling: str) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": scaling.split("-")[0], "rope_theta": 5000.0, **SCALINGS[scaling]},
    )


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [1, 60, 300])
def test_rotation_equals_transformers(scaling: str, length: int) -> None:
    config = llama_config(scaling)
    positions = torch.arange(length)
    queries, keys = torch.randn(length, 2, 32), torch.randn(length, 2, 32)
    cos, sin = LlamaRotaryEmbedding(config)(queries, positions[None])
    expected = apply_rotary_pos_emb(queries[None], keys[None], cos, sin, unsqueeze_dim=2)
    rope = RotaryEmbedding(ModelConfig.from_hugging_face(config).ropes[0], CPU)
    rotation = rope.rotation(positions, torch.full((length,), length))
    for actual, wanted in zip((rotation.apply(queries), rotation.apply(keys)), expected, strict=True):
        torch.testing.assert_close(actual, wanted[0], rtol=1e-4, atol=1e-4)


def test_a_scaling_changes_the_rotation() -> None:
    positions = torch.arange(100)
    rotations = [
        RotaryEmbedding(ModelConfig.from_hugging_face(llama_config(scaling)).ropes[0], CPU)
        .rotation(positions, torch.full((100,), 400))
        .cos
        for scaling in SCALINGS
    ]
    for index, rotation in enumerate(rotations):
        assert all((rotation - other).abs().max() > 1e-2 for other in rotations[:index])


def test_dynamic_frequencies_depend_on_the_prompt_not_on_its_chunks() -> None:
    rope = RotaryEmbedding(ModelConfig.from_hugging_face(llama_config("dynamic")).ropes[0], CPU)
    whole = rope.rotation(torch.arange(300), torch.full((300,), 300))
    chunk = rope.rotation(torch.arange(100, 140), torch.full((40,), 300))
    torch.testing.assert_close(chunk.cos, whole.cos[100:140], rtol=0, atol=1e-5)
    # A generated token has the frequencies of a sequence that ends with this token.
    generated = rope.rotation(torch.tensor([399]), torch.tensor([300]))
    torch.testing.assert_close(generated.sin[0], rope.rotation(torch.arange(400), torch.full((400,), 400)).sin[399])


@pytest.mark.parametrize("context", [256, 64], ids=["crosses", "short only"])
def test_tables_of_a_step_are_the_rotations(context: int) -> None:
    """Of rows below, across and above the original length, in one step on a GPU."""
    config = ModelConfig.from_hugging_face(llama_config("longrope")).ropes[0]
    assert config.original_positions == 64
    starts, counts, prompt_lens = [0, 63, 10, 5], [5, 1, 7, 3], [5, 20, 64, 17]
    if context > 64:
        starts, counts, prompt_lens = [0, 63, 64, 10, 100], [5, 1, 1, 7, 2], [5, 20, 20, 65, 102]
    positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = StepRows(offsets, torch.tensor(prompt_lens, dtype=torch.int32))
    found = StepRotations(config, context, 40, CPU)(positions.int(), rows)
    lengths = torch.tensor(prompt_lens).repeat_interleave(torch.tensor(counts))
    wanted = RotaryEmbedding(config, CPU).rotation(positions, lengths)
    taken = found.table[found.rows.long()]
    torch.testing.assert_close(taken[:, :16], wanted.cos[:, 0, :16], rtol=0, atol=0)
    torch.testing.assert_close(taken[:, 16:], wanted.sin[:, 0, 16:], rtol=0, atol=0)


def test_partial_rotation_passes_the_other_dimensions() -> None:
    config = RopeConfig(RopeType.DEFAULT, theta=100.0, rotary_dim=8)
    x = torch.randn(5, 2, 32)
    rotated = RotaryEmbedding(config, CPU).rotation(torch.arange(5), torch.full((5,), 5)).apply(x)
    assert torch.equal(rotated[..., 8:], x[..., 8:])
    assert not torch.allclose(rotated[1:, :, :8], x[1:, :, :8])
