"""Tiny random models of every causal class of transformers that lets its attention be replaced, saved as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from runner_svc.backends.byte_tokenizer import CHAT_TEMPLATE, NUM_TOKENS, build_byte_tokenizer

_SIZES: dict[str, Any] = {
    # of nearly all
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": NUM_TOKENS,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # older names
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "n_ctx": 256,
    "n_inner": 96,
    "rotary_dim": 8,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "dff": 96,
    "d_model": 64,
    "num_layers": 4,
    "num_heads": 4,
    "type_vocab_size": 2,
    # others
    "global_head_dim": 32,
    "query_pre_attn_scalar": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": NUM_TOKENS,
    "num_key_value_groups": 2,
    "mamba_d_state": 8,
    "attn_layer_period": 2,
}
_LAYERS = ["sliding_attention", "full_attention"] * 2
_MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4, "rope_parameters": {"full_attention": _MROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1000.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
        | {"num_hidden_layers": 4}
    },
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _LAYERS, "activation_sparsity_pattern": [0.0] * 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "moshi": {"audio_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""By model type, what differs from `_SIZES`."""


def names() -> list[tuple[str, str]]:
    """Returns (model type, class) of each causal class that declares `_supports_attention_backend`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    pairs = [
        (kind, name)
        for kind, listed in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        for name in ((listed,) if isinstance(listed, str) else listed)
    ]
    return [(kind, name) for kind, name in pairs if getattr(_class(name), "_supports_attention_backend", False)]


def _class(name: str) -> Any:
    return getattr(transformers, name, None)


def tiny_config(model_type: str) -> Any:
    """Returns a small configuration of the type."""
    return transformers.CONFIG_MAPPING[model_type](**_sizes(transformers.CONFIG_MAPPING[model_type], model_type))


def _sizes(config_class: Any, model_type: str) -> dict[str, Any]:
    """Returns arguments of the class: those of its keys that `_SIZES` has, and those of its parts."""
    own = _OWN.get(model_type, {})
    try:
        default = config_class()
    except Exception:  # a part's defaults are not allowed in it
        default = config_class(text_config=own["text_config"])
    aliases = dict(getattr(config_class, "attribute_map", None) or {})
    known = set(default.to_dict()) | set(aliases)
    sizes: dict[str, Any] = {key: value for key, value in {**_SIZES, **own}.items() if key in known or key in own}
    if "kv_lora_rank" in known:  # latent attention has as many key heads as query heads
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        if "head_dim" in known:
            sizes["head_dim"] = _SIZES["qk_rope_head_dim"]
    for alias, target in aliases.items():
        if alias in sizes and target in sizes:
            del sizes[alias]
    for part, value in vars(default).items():
        if isinstance(value, transformers.PreTrainedConfig):
            sizes[part] = {**_sizes(type(value), value.model_type), **own.get(part, {})}
    return sizes


def make_unloadable(model_type: str, name: str, folder: Path) -> Path:
    """Saves a folder of a class that can't be made here: its configuration, and weights that nothing reads."""
    config = transformers.CONFIG_MAPPING[model_type]()
    config.architectures = [name]
    config.save_pretrained(folder)
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def make_tiny(model_type: str, name: str, folder: Path, seed: int = 0, config: Any = None) -> Path:
    """Saves a random model of the class in `folder`, with a byte-level tokenizer; returns the folder.

    No token ends an answer. Weights are so large that greedy decoding has clear winners.
    """
    config = config or tiny_config(model_type)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 0.15)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(folder)
    config.architectures = [name]
    config.save_pretrained(folder)  # of all parts, where the class is that of the text part
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=build_byte_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder
