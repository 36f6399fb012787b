"""GLM and GLM-4 (of 2025, "glm4"): half of each head rotates, in pairs of neighbours; GLM-4 has norms around."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from runner_svc.model.families.description import LayerDescription, MlpDescription
from runner_svc.model.families.family import Config, Family, size
from runner_svc.model.families.tensor_names import TensorNames


def _layers(config: Config, num_layers: int, *, post_norms: bool) -> Sequence[LayerDescription]:
    layer = LayerDescription(
        MlpDescription(size(config, "intermediate_size"), config["hidden_act"]),
        post_norms=post_norms,
        qkv_bias=bool(config.get("attention_bias")),
    )
    return [layer] * num_layers


_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("vocab_size", 151_552),
    ("hidden_size", 4096),
    ("intermediate_size", 13_696),
    ("num_hidden_layers", 40),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 2),
    ("head_dim", 128),
    ("hidden_act", "silu"),
    ("max_position_embeddings", 131_072),
    ("rms_norm_eps", 1.5625e-7),
    ("partial_rotary_factor", 0.5),
    ("attention_bias", True),
    ("eos_token_id", (151_329, 151_336, 151_338)),
)

GLM = Family(
    "glm",
    partial(_layers, post_norms=False),
    names=TensorNames(gate_up=("mlp.gate_up_proj",), interleaved=True),
    defaults=_DEFAULTS,
)
GLM4 = Family(
    "glm4",
    partial(_layers, post_norms=True),
    names=TensorNames(
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        gate_up=("mlp.gate_up_proj",),
        interleaved=True,
    ),
    defaults=_DEFAULTS,
)
