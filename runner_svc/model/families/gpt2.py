"""GPT-2: learned positions, layer norms, biases, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Sequence

from runner_svc.model.families.description import LayerDescription, MlpDescription, ModelDescription, NormKind
from runner_svc.model.families.family import Config, Family, no_rope, refuse, size
from runner_svc.model.families.tensor_names import TensorNames


def _layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    refuse(config, add_cross_attention=False)
    hidden_size, num_heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(f"'n_embd' {hidden_size} is not a multiple of {num_heads} heads")
    inner = size(config, "intermediate_size") if "intermediate_size" in config else 4 * hidden_size
    scale = (hidden_size // num_heads) ** -0.5 if config.get("scale_attn_weights") else 1.0
    return [
        LayerDescription(
            MlpDescription(inner, config["hidden_act"], gated=False, bias=True),
            norm=NormKind.LAYER,
            qkv_bias=True,
            output_bias=True,
            rope=None,
            scale=scale / (index + 1) if config.get("scale_attn_by_inverse_layer_idx") else scale,
        )
        for index in range(num_layers)
    ]


def _model(config: Config) -> ModelDescription:
    return ModelDescription(position_offset=0)


GPT2 = Family(
    "gpt2",
    _layers,
    _model,
    no_rope,
    names=TensorNames(
        base="transformer",
        embeddings="wte",
        positions="wpe",
        norm="ln_f",
        layers="h",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
        transposed=True,
    ),
    defaults=(
        ("vocab_size", 50_257),
        ("hidden_size", 768),
        ("num_hidden_layers", 12),
        ("num_attention_heads", 12),
        ("hidden_act", "gelu_new"),
        ("max_position_embeddings", 1024),
        ("layer_norm_epsilon", 1e-5),
        ("scale_attn_weights", True),
        ("eos_token_id", 50_256),
        ("tie_word_embeddings", True),
    ),
    renamed=(
        ("n_embd", "hidden_size"),
        ("n_layer", "num_hidden_layers"),
        ("n_head", "num_attention_heads"),
        ("n_positions", "max_position_embeddings"),
        ("n_inner", "intermediate_size"),
        ("activation_function", "hidden_act"),
    ),
    unread=("num_key_value_heads", "head_dim", "intermediate_size"),
    norm_eps="layer_norm_epsilon",
)
