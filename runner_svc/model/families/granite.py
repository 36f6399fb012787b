"""Granite: Llama with factors of embeddings, attention, additions and logits."""

from __future__ import annotations

from collections.abc import Sequence

from runner_svc.model.families.description import LayerDescription, MlpDescription, ModelDescription
from runner_svc.model.families.family import Config, Family, size


def _layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    has_bias = bool(config.get("attention_bias"))
    layer = LayerDescription(
        MlpDescription(size(config, "intermediate_size"), config["hidden_act"], bias=bool(config.get("mlp_bias"))),
        qkv_bias=has_bias,
        output_bias=has_bias,
        scale=float(config["attention_multiplier"]),
        multiplier=float(config["residual_multiplier"]),
    )
    return [layer] * num_layers


def _model(config: Config) -> ModelDescription:
    return ModelDescription(
        embedding_scale=float(config["embedding_multiplier"]), logits_scale=1 / float(config["logits_scaling"])
    )


GRANITE = Family(
    "granite",
    _layers,
    _model,
    defaults=(
        ("vocab_size", 32_000),
        ("hidden_size", 4096),
        ("intermediate_size", 11_008),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
        ("hidden_act", "silu"),
        ("max_position_embeddings", 2048),
        ("rms_norm_eps", 1e-6),
        ("eos_token_id", 2),
        ("embedding_multiplier", 1.0),
        ("logits_scaling", 1.0),
        ("residual_multiplier", 1.0),
        ("attention_multiplier", 1.0),
    ),
)
