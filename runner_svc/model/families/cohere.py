"""Cohere (Command R) and Cohere 2 (Command R7B): attention and MLP side by side behind one layer norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner_svc.model.families.description import LayerDescription, MlpDescription, ModelDescription, NormKind, QkNorm
from runner_svc.model.families.family import SLIDING, Config, Family, layer_kinds, size
from runner_svc.model.families.tensor_names import TensorNames


def _layer(config: Config, **own: Any) -> LayerDescription:
    has_bias = bool(config.get("attention_bias"))
    return LayerDescription(
        MlpDescription(size(config, "intermediate_size"), config["hidden_act"]),
        norm=NormKind.LAYER,
        parallel=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        **own,
    )


def _layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    return [_layer(config, qk_norm=QkNorm.LAYER_HEAD if config.get("use_qk_norm") else QkNorm.NONE)] * num_layers


def _second_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """Only layers with a window rotate."""
    window = config.get("sliding_window")
    kinds = layer_kinds(config, num_layers, size(config, "sliding_window_pattern"))
    return [
        _layer(config, window=window, rope=0) if kind == SLIDING and window is not None else _layer(config, rope=None)
        for kind in kinds
    ]


def _model(config: Config) -> ModelDescription:
    return ModelDescription(logits_scale=float(config["logit_scale"]))


_NAMES = TensorNames(norm_bias=False, interleaved=True)
_DEFAULTS: tuple[tuple[str, Any], ...] = (
    ("vocab_size", 256_000),
    ("hidden_size", 8192),
    ("intermediate_size", 22_528),
    ("logit_scale", 0.0625),
    ("num_hidden_layers", 40),
    ("num_attention_heads", 64),
    ("hidden_act", "silu"),
    ("max_position_embeddings", 8192),
    ("layer_norm_eps", 1e-5),
    ("eos_token_id", 255_001),
    ("tie_word_embeddings", True),
)

COHERE = Family(
    "cohere",
    _layers,
    _model,
    names=_NAMES,
    defaults=(*_DEFAULTS, ("rope_theta", 500_000.0)),
    norm_eps="layer_norm_eps",
)
COHERE2 = Family(
    "cohere2",
    _second_layers,
    _model,
    names=_NAMES,
    defaults=(*_DEFAULTS, ("sliding_window", 4096), ("sliding_window_pattern", 4)),
    unread=("head_dim",),
    norm_eps="layer_norm_eps",
)
