"""Small random models of each supported family, saved as Hugging Face folders with a byte-level tokenizer.

The weights' scale makes greedy decoding have clear winners. Norms and biases differ from their defaults, so that a
missing one changes the output.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from runner_svc.backends.byte_tokenizer import CHAT_TEMPLATE, IM_END_ID, NUM_TOKENS, build_byte_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": IM_END_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1000.0, **parameters}}


def _gemma3_with_images(**text: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, **sizes}
    return transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config=vision,
        mm_tokens_per_image=4,
        eos_token_id=text["eos_token_id"],
        pad_token_id=None,
        tie_word_embeddings=True,
    )


FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-head-dim": (
        transformers.LlamaConfig,
        {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
    ),
    "llama-llama3": (
        transformers.LlamaConfig,
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-linear": (transformers.LlamaConfig, _rope("linear", factor=4.0)),
    "llama-dynamic": (transformers.LlamaConfig, {"max_position_embeddings": 32, **_rope("dynamic", factor=4.0)}),
    "llama-longrope": (
        transformers.LlamaConfig,
        {
            "head_dim": 64,
            **_rope(
                "longrope",
                original_max_position_embeddings=32,
                short_factor=[1.0 + index / 32 for index in range(32)],
                long_factor=[2.0 + index / 8 for index in range(32)],
            ),
        },
    ),
    "llama-yarn": (
        transformers.LlamaConfig,
        _rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=0.5),
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 11}),
    "ministral": (
        transformers.MinistralConfig,
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3-partial": (transformers.Phi3Config, {"sliding_window": None, **_rope("default", partial_rotary_factor=0.5)}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "smollm3": (transformers.SmolLM3Config, {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "gemma": (transformers.GemmaConfig, {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 12.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3-with-images": (_gemma3_with_images, {"head_dim": 32, "sliding_window": 9}),
    "granite": (
        transformers.GraniteConfig,
        {
            "attention_multiplier": 0.15,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "glm": (transformers.GlmConfig, {"head_dim": 32}),
    "glm4": (transformers.Glm4Config, {"head_dim": 32, "attention_bias": False}),
    "cohere": (transformers.CohereConfig, {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "cohere-qk-norm": (transformers.CohereConfig, {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": (transformers.Cohere2Config, {"num_hidden_layers": 4, "logit_scale": 0.3, "sliding_window": 9}),
    "gpt2": (transformers.GPT2Config, {"n_inner": 96, "tie_word_embeddings": True}),
    "gpt2-scaled-by-layer": (
        transformers.GPT2Config,
        {"tie_word_embeddings": True, "scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"},
    ),
    "opt": (transformers.OPTConfig, {"ffn_dim": 96, "tie_word_embeddings": True}),
    "opt-without-biases": (transformers.OPTConfig, {"ffn_dim": 96, "enable_bias": False}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2-moe": (
        transformers.Qwen2MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 32,
        },
    ),
    "gpt-oss": (
        transformers.GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "intermediate_size": 64,
            "sliding_window": 11,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
    ),
    "glm4-moe": (
        transformers.Glm4MoeConfig,
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 32,
        },
    ),
    "dots1": (
        transformers.Dots1Config,
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "ernie4-5-moe": (
        transformers.Ernie4_5_MoeConfig,
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 64, "moe_norm_min": 0.5},
    ),
}
"""Name to configuration class and the differences from `SIZES`."""

LIKE_OTHERS = {
    "qwen2-moe",
    "llama-linear",
    "gemma",
    "gemma3-with-images",
    "glm",
    "cohere-qk-norm",
    "cohere2",
    "gpt2-scaled-by-layer",
    "opt-without-biases",
    "dots1",
    "ernie4-5-moe",
}
"""Families that CI leaves out of tests of all families, since others have most of what they have."""
IN_CI = [family for family in FAMILIES if family not in LIKE_OTHERS]
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
"""Their logits lie far apart, so that experts that are nearly tied have little weight."""
CORRECTIONS = "e_score_correction_bias"
"""Of a router, in float32: a buffer in most classes."""

KERNEL_SIZES = {
    "llama": {"hidden_size": 256},
    "llama-tied": {"hidden_size": 256},
    "llama-biases": {"hidden_size": 256},
    "llama-head-dim": {"hidden_size": 192, "head_dim": 96},
    "llama-linear": {"hidden_size": 256},
    "llama-dynamic": {"hidden_size": 256},
    "llama-llama3": {"hidden_size": 512},
    "llama-longrope": {"hidden_size": 256},
    "llama-yarn": {"hidden_size": 256},
    "mistral": {"hidden_size": 384, "head_dim": 256},
    "ministral": {"hidden_size": 256, "head_dim": 64},
    "phi3-partial": {"hidden_size": 256},
    "qwen2": {"hidden_size": 256},
    "qwen2-window": {"hidden_size": 512},
    "qwen3": {"hidden_size": 256, "head_dim": 128},
    "smollm3": {"hidden_size": 256},
    "gemma": {"hidden_size": 256, "head_dim": 256},
    "gemma2": {"hidden_size": 256, "head_dim": 64},
    "gemma3": {"hidden_size": 256, "head_dim": 128},
    "gemma3-with-images": {"hidden_size": 256, "head_dim": 64},
    "granite": {"hidden_size": 256},
    "olmo2": {"hidden_size": 256},
    "glm": {"hidden_size": 256, "head_dim": 128},
    "glm4": {"hidden_size": 256, "head_dim": 64},
    "cohere": {"hidden_size": 256},
    "cohere-qk-norm": {"hidden_size": 256},
    "cohere2": {"hidden_size": 256},
    "gpt2": {"hidden_size": 256},
    "opt": {"hidden_size": 256},
    "opt-without-biases": {"hidden_size": 256},
    "mixtral": {"hidden_size": 256, "intermediate_size": 128},
    "qwen2-moe": {"hidden_size": 256},
    "qwen3-moe": {"hidden_size": 256, "head_dim": 64},
    "glm4-moe": {"hidden_size": 256, "head_dim": 64},
    "dots1": {"hidden_size": 256},
    "ernie4-5-moe": {"hidden_size": 256},
    "gpt-oss": {"hidden_size": 256, "head_dim": 64},
}
"""Sizes of each family with which the GPU kernels are tested: heads of 64, 96, 128 and 256 elements."""


def make_tiny_model(
    family: str, folder: Path, seed: int = 0, rounded_to: torch.dtype = torch.float32, **sizes: int
) -> Path:
    """Creates `folder` with a random model of the family (a key of `FAMILIES`); returns the folder.

    It contains config.json, generation_config.json, model.safetensors, tokenizer.json and a chat template. The weights
    depend only on family, seed and sizes. They are float32 values exactly representable in `rounded_to`; `sizes`
    overrides the family's sizes.
    """
    config_class, overrides = FAMILIES[family]
    # Copies each value: transformers modifies the dicts that it is given.
    config = config_class(**{key: _copied(value) for key, value in {**SIZES, **overrides, **sizes}.items()})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model)
        model.to(rounded_to).to(torch.float32)
    model.generation_config.eos_token_id = IM_END_ID
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=build_byte_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value


def randomize(model: torch.nn.Module) -> None:
    """Draws all weights from torch's generator."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTIONS):
                buffer.normal_(0.0, 0.2)
        for name, parameter in model.named_parameters():
            if name.endswith(CORRECTIONS):
                parameter.normal_(0.0, 0.2)
            elif parameter.dim() == 3:  # of all experts
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
            elif name.endswith(ROUTERS):
                parameter.normal_(0.0, 4.0 / parameter.shape[-1] ** 0.5)
            elif parameter.dim() == 2:
                scale = 1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5
                parameter.normal_(0.0, scale)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(1.0, 0.2)
