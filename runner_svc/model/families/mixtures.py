"""Mixtures of experts with the attention of Llama, and gpt-oss; some with experts that compute every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner_svc.model.families.description import LayerDescription, MlpDescription, QkNorm
from runner_svc.model.families.experts_config import (
    ExpertsConfig,
    ernie_experts,
    gpt_oss_experts,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
    sigmoid_experts,
)
from runner_svc.model.families.family import FULL, SLIDING, Config, Family, layer_kinds, qk_norm_of, refuse
from runner_svc.model.families.tensor_names import ExpertNames, TensorNames


def qwen3_moe_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """Returns the layers, all of which have the window. Raises ValueError."""
    has_bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    layer = LayerDescription(
        _dense(config), qkv_bias=has_bias, output_bias=has_bias, qk_norm=QkNorm.HEAD, window=window
    )
    return _with_experts(layer, qwen3_experts(config, num_layers))


def qwen2_moe_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """Returns the layers, with the windows of `layer_types`. Raises ValueError."""
    layer = LayerDescription(_dense(config), qkv_bias=bool(config.get("qkv_bias", True)))
    experts = qwen2_experts(config, num_layers)
    has_windows = bool(config.get("use_sliding_window", False))
    last = config.get("max_window_layers", 28) if has_windows else 0
    kinds = [SLIDING if index % 2 == 0 and index < last else FULL for index in range(num_layers)]
    kinds = list(layer_kinds({"layer_types": kinds, **config}, num_layers, pattern=2))
    window = config.get("sliding_window", 4096) if has_windows else 0
    if not window and SLIDING in kinds:
        raise ValueError("'layer_types' names sliding_attention, but 'use_sliding_window' is not set")
    return [
        replace(layer, mlp=layer.mlp if each is None else each, window=window if kind == SLIDING else None)
        for each, kind in zip(experts, kinds, strict=True)
    ]


def mixtral_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """Returns the layers, all of which are alike. Raises ValueError."""
    return [LayerDescription(mixtral_experts(config), window=config.get("sliding_window"))] * num_layers


def gpt_oss_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """Returns the layers, every other of which has the window, if `layer_types` does not tell. Raises ValueError."""
    has_bias = bool(config.get("attention_bias", True))
    layer = LayerDescription(gpt_oss_experts(config), qkv_bias=has_bias, output_bias=has_bias, sinks=True)
    window = config.get("sliding_window", 128)
    kinds = layer_kinds(config, num_layers, pattern=2)
    return [replace(layer, window=window if kind == SLIDING else None) for kind in kinds]


def glm4_moe_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """Returns the layers, the first of which may be dense. Raises ValueError."""
    layer = LayerDescription(
        _dense(config),
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=qk_norm_of(bool(config.get("use_qk_norm", False))),
    )
    return _with_experts(layer, sigmoid_experts(config, num_layers))


def dots1_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """Returns the layers, the first of which may be dense, with the windows of `layer_types`. Raises ValueError."""
    has_bias = bool(config.get("attention_bias", False))
    layer = LayerDescription(_dense(config), qkv_bias=has_bias, output_bias=has_bias, qk_norm=QkNorm.HEAD)
    layers = _with_experts(layer, sigmoid_experts(config, num_layers))
    kinds, window = config.get("layer_types", [FULL] * num_layers), config.get("sliding_window")
    return [replace(each, window=window if kind == SLIDING else None) for each, kind in zip(layers, kinds, strict=True)]


def ernie_moe_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    """Returns the layers, some of which may be dense. Raises ValueError."""
    refuse(config, use_bias=False)
    return _with_experts(LayerDescription(_dense(config)), ernie_experts(config, num_layers))


def _with_experts(dense: LayerDescription, experts: Sequence[ExpertsConfig | None]) -> Sequence[LayerDescription]:
    return [dense if each is None else replace(dense, mlp=each) for each in experts]


def _dense(config: Config) -> MlpDescription:
    """The MLP of layers without experts."""
    return MlpDescription(width=config["intermediate_size"], activation=config.get("hidden_act", "silu"))


_MIXTRAL_NAMES = ExpertNames(("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2")
_SHARED_NAMES = ExpertNames(shared="shared_experts")
_ERNIE_NAMES = replace(
    _SHARED_NAMES,
    corrections=("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"),
    has_wide_corrections=True,
)
_GPT_OSS_NAMES = ExpertNames(router="router", interleaved=True)

QWEN3_MOE = Family(
    "qwen3_moe",
    qwen3_moe_layers,
    defaults=(("intermediate_size", 6144), ("num_key_value_heads", 4), ("max_position_embeddings", 32768)),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    qwen2_moe_layers,
    defaults=(("intermediate_size", 5632), ("num_key_value_heads", 16), ("max_position_embeddings", 32768)),
)
MIXTRAL = Family(
    "mixtral",
    mixtral_layers,
    names=TensorNames(experts=_MIXTRAL_NAMES),
    defaults=(
        ("intermediate_size", 14336),
        ("num_key_value_heads", 8),
        ("max_position_embeddings", 131072),
        ("rms_norm_eps", 1e-5),
        ("rope_theta", 1_000_000.0),
    ),
)
GPT_OSS = Family(
    "gpt_oss",
    gpt_oss_layers,
    names=TensorNames(experts=_GPT_OSS_NAMES),
    defaults=(
        ("intermediate_size", 2880),
        ("num_key_value_heads", 8),
        ("head_dim", 64),
        ("max_position_embeddings", 131072),
        ("rms_norm_eps", 1e-5),
        ("rope_theta", 150_000.0),
    ),
)
GLM4_MOE = Family("glm4_moe", glm4_moe_layers, names=TensorNames(experts=_SHARED_NAMES, predictor="eh_proj"))
DOTS1 = Family("dots1", dots1_layers, names=TensorNames(experts=_SHARED_NAMES))
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    ernie_moe_layers,
    names=TensorNames(
        experts=_ERNIE_NAMES,
        interleaved=True,
        # They predict further tokens.
        other_parts=("model.mtp_",),
    ),
)
