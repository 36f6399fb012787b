"""OLMo 2: norms after attention and MLP in place of those before, and queries and keys normed as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from runner_svc.model.families.description import LayerDescription, MlpDescription, QkNorm
from runner_svc.model.families.family import Config, Family, size


def _layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    has_bias = bool(config.get("attention_bias"))
    layer = LayerDescription(
        MlpDescription(size(config, "intermediate_size"), config["hidden_act"]),
        pre_norms=False,
        post_norms=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QkNorm.PROJECTION,
    )
    return [layer] * num_layers


OLMO2 = Family(
    "olmo2",
    _layers,
    defaults=(
        ("vocab_size", 50_304),
        ("hidden_size", 4096),
        ("intermediate_size", 11_008),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
        ("hidden_act", "silu"),
        ("max_position_embeddings", 2048),
        ("rms_norm_eps", 1e-5),
        ("eos_token_id", 50_279),
    ),
)
