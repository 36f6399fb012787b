"""Gemma, Gemma 2 and Gemma 3: norms with weights around one, scaled embeddings; norms around, windows and caps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runner_svc.model.families.description import LayerDescription, MlpDescription, ModelDescription, NormKind, QkNorm
from runner_svc.model.families.family import FULL, SLIDING, Config, Family, layer_kinds, refuse, size
from runner_svc.model.families.tensor_names import TensorNames

_GLOBAL, _LOCAL = 0, 1
"""Rotary embeddings of Gemma 3, of layers without and with a window."""


def _mlp(config: Config, activation: str) -> MlpDescription:
    return MlpDescription(size(config, "intermediate_size"), activation)


def _gemma1_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    refuse(config, use_bidirectional_attention=False)
    activation = config["hidden_act"]
    has_bias = bool(config.get("attention_bias"))
    layer = LayerDescription(
        # As transformers: "gelu" in the first releases means its approximation.
        _mlp(config, "gelu_pytorch_tanh" if activation == "gelu" else activation),
        norm=NormKind.RMS_PLUS_ONE,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    return [layer] * num_layers


def _layer(config: Config, kind: str) -> LayerDescription:
    """Returns a layer of Gemma 2."""
    refuse(config, use_bidirectional_attention=False)
    has_bias = bool(config.get("attention_bias"))
    return LayerDescription(
        _mlp(config, config["hidden_activation"]),
        norm=NormKind.RMS_PLUS_ONE,
        post_norms=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        scale=float(config["query_pre_attn_scalar"]) ** -0.5,
        window=config.get("sliding_window") if kind == SLIDING else None,
        soft_cap=config.get("attn_logit_softcapping"),
    )


def _gemma2_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    return [_layer(config, kind) for kind in layer_kinds(config, num_layers, 2)]


def _gemma3_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """`attn_logit_softcapping` is a key that transformers' class does not use."""
    kinds = layer_kinds(config, num_layers, size(config, "sliding_window_pattern"))
    return [
        replace(_layer(config, kind), soft_cap=None, qk_norm=QkNorm.HEAD, rope=_LOCAL if kind == SLIDING else _GLOBAL)
        for kind in kinds
    ]


def _model(config: Config) -> ModelDescription:
    return ModelDescription(
        embedding_scale=float(size(config, "hidden_size")) ** 0.5,
        logits_soft_cap=config.get("final_logit_softcapping"),
    )


def _gemma1_model(config: Config) -> ModelDescription:
    return ModelDescription(embedding_scale=float(size(config, "hidden_size")) ** 0.5)


def _gemma3_ropes(config: Config) -> Sequence[Config]:
    """As transformers: `rope_scaling` and `rope_theta` are of layers without a window."""
    given = config.get("rope_parameters") or {}
    if not all(isinstance(value, Mapping) for value in given.values() if value is not None):
        raise ValueError(f"'rope_parameters' must have an object for each of {FULL} and {SLIDING}")
    rope_global = {**(given.get(FULL) or {}), **(config.get("rope_scaling") or {})}
    rope_local = given.get(SLIDING) or {}
    rope_global.setdefault("rope_theta", config["rope_theta"])
    return [
        {**config, "rope_parameters": rope_global},
        {**config, "rope_parameters": {"rope_theta": config["rope_local_base_freq"], **rope_local}},
    ]


_COMMON_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("vocab_size", 256_000),
    ("head_dim", 256),
    ("rms_norm_eps", 1e-6),
    ("tie_word_embeddings", True),
    ("eos_token_id", 1),
)
_SECOND_DEFAULTS: tuple[tuple[str, Any], ...] = (
    *_COMMON_DEFAULTS,
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("hidden_activation", "gelu_pytorch_tanh"),
    ("query_pre_attn_scalar", 256),
    ("sliding_window", 4096),
)
_NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")

GEMMA = Family(
    "gemma",
    _gemma1_layers,
    _gemma1_model,
    defaults=(
        *_COMMON_DEFAULTS,
        ("hidden_size", 3072),
        ("intermediate_size", 24_576),
        ("num_hidden_layers", 28),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 16),
        ("hidden_act", "gelu_pytorch_tanh"),
        ("max_position_embeddings", 8192),
    ),
)
GEMMA2 = Family(
    "gemma2",
    _gemma2_layers,
    _model,
    names=_NAMES,
    defaults=(
        *_SECOND_DEFAULTS,
        ("max_position_embeddings", 8192),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
    ),
)
GEMMA3 = Family(
    "gemma3_text",
    _gemma3_layers,
    _model,
    _gemma3_ropes,
    names=replace(
        _NAMES,
        other_bases=("model.language_model", "language_model.model", ""),
        other_parts=(
            "model.vision_tower.",
            "model.multi_modal_projector.",
            "vision_tower.",
            "multi_modal_projector.",
        ),
    ),
    defaults=(
        *_SECOND_DEFAULTS,
        ("vocab_size", 262_208),
        ("max_position_embeddings", 131_072),
        ("sliding_window_pattern", 6),
        ("rope_theta", 1_000_000.0),
        ("rope_local_base_freq", 10_000.0),
    ),
    stretches=False,
)
