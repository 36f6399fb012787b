"""GPT-2 and OPT: learned positions, layer norms, biases, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Sequence

from runner_svc.model.families.description import LayerDescription, MlpDescription, ModelDescription, NormKind
from runner_svc.model.families.family import Config, Family, no_rope, refuse, size
from runner_svc.model.families.tensor_names import TensorNames


def _gpt2_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
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


def _gpt2_model(config: Config) -> ModelDescription:
    return ModelDescription(position_offset=0)


GPT2 = Family(
    "gpt2",
    _gpt2_layers,
    _gpt2_model,
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


def _opt_layers(config: Config, num_layers: int) -> Sequence[LayerDescription]:
    hidden_size, num_heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if hidden_size % num_heads:
        raise ValueError(f"'hidden_size' {hidden_size} is not a multiple of {num_heads} heads")
    refuse(
        config,
        do_layer_norm_before=True,
        _remove_final_layer_norm=False,
        layer_norm_elementwise_affine=True,
        word_embed_proj_dim=hidden_size,
    )
    has_bias = bool(config.get("enable_bias"))
    layer = LayerDescription(
        MlpDescription(size(config, "intermediate_size"), config["hidden_act"], gated=False, bias=has_bias),
        norm=NormKind.LAYER,
        qkv_bias=has_bias,
        output_bias=has_bias,
        rope=None,
    )
    return [layer] * num_layers


def _opt_model(config: Config) -> ModelDescription:
    return ModelDescription(position_offset=2)


OPT = Family(
    "opt",
    _opt_layers,
    _opt_model,
    no_rope,
    names=TensorNames(
        base="model.decoder",
        other_bases=("decoder",),
        norm="final_layer_norm",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        output="self_attn.out_proj",
        gate_up=("fc1",),
        down="fc2",
    ),
    defaults=(
        ("vocab_size", 50_272),
        ("hidden_size", 768),
        ("num_hidden_layers", 12),
        ("intermediate_size", 3072),
        ("num_attention_heads", 12),
        ("hidden_act", "relu"),
        ("max_position_embeddings", 2048),
        ("enable_bias", True),
        ("eos_token_id", 2),
        ("tie_word_embeddings", True),
    ),
    renamed=(("ffn_dim", "intermediate_size"), ("activation_function", "hidden_act")),
    unread=("num_key_value_heads", "head_dim", "intermediate_size"),
    norm_eps=1e-5,
)
