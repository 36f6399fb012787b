"""RoPE whose frequencies depend on the longest row gives `generate`'s tokens whatever stands beside a row."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runner_svc.transformers_decoder.row_rope import RowLengths, compute_by_row
from tests.support.in_process import Stack
from tests.support.thoroughness import choice
from tests.support.tiny_models import SIZES
from tests.support.transformers_models import make_tiny
from tests.support.transformers_sweep import VOCABULARY, generated, load, prompt_of

ORIGINAL = 32
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + index / 8 for index in range(8)],
    "long_factor": [2.0 + index / 2 for index in range(8)],
}
SMALL = {"eos_token_id": None, "max_position_embeddings": ORIGINAL}
BY_LAYER = {
    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": DYNAMIC},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
    "head_dim": 16,
}


def config(kind: str) -> Any:
    if kind == "dynamic":
        return transformers.LlamaConfig(**{**SIZES, **SMALL, "rope_parameters": dict(DYNAMIC)})
    if kind == "longrope":
        return transformers.LlamaConfig(**{**SIZES, "eos_token_id": None, "rope_parameters": dict(LONG)})
    if kind == "phi3":
        phi3 = {**SIZES, "eos_token_id": None, "original_max_position_embeddings": ORIGINAL, "pad_token_id": 0}
        return transformers.Phi3Config(**phi3, rope_parameters=dict(LONG))
    scaled = {**LONG, "short_mscale": 1.1, "long_mscale": 1.2}
    return transformers.PhimoeConfig(**{**SIZES, "eos_token_id": None}, num_local_experts=4, rope_parameters=scaled)


@pytest.mark.parametrize("kind", choice(["dynamic", "longrope", "phi3", "phimoe"], in_ci=["dynamic", "longrope"]))
def test_rows_of_unlike_lengths_give_the_tokens_of_generate(kind: str, tmp_path: Path) -> None:
    made = config(kind)
    folder = make_tiny(made.model_type, type(made).__name__.replace("Config", "ForCausalLM"), tmp_path, config=made)
    backend = load(folder, num_blocks=48)
    assert backend.model.prefix_positions == ORIGINAL
    crosses = kind in ("dynamic", "longrope")
    assert backend.model.context_length == (4 * ORIGINAL if kind == "dynamic" else 256 if crosses else ORIGINAL)
    rng = random.Random(0)
    stack = Stack(depth=2, policy_parameters={"step_tokens": 9})
    stack.add_runner(backend)
    stem = [rng.choice(VOCABULARY) for _ in range(40)]
    for length in (3, 28, 40, 31, 12) if crosses else (3, 17, 9, 20, 20):
        stack.submit(stem[:length], 12)
    stack.run(rng)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for request in stack.requests.values():
        assert request.streams[0].tokens == generated(model, prompt_of(request), 12)


def test_a_rotary_embedding_by_kind_of_layer_is_computed_by_row() -> None:
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**SIZES, **SMALL, **BY_LAYER})).eval()
    rows = RowLengths()
    rotary = model.model.rotary_emb
    assert compute_by_row(model, rows) == ORIGINAL
    x, positions = torch.zeros(1, 3, 64), torch.tensor([[3, 3, 3]])
    rows.lengths = torch.tensor([4, 50, 90])
    cos, _ = rotary(x, positions, "full_attention")
    assert len({tuple(row.tolist()) for row in cos[0]}) == 3
    cos, _ = rotary(x, positions, "sliding_attention")
    assert len({tuple(row.tolist()) for row in cos[0]}) == 1
