"""The parts of a configuration that differ between families: activations, windows, scales and caps."""

from __future__ import annotations

import math
from typing import Any

from runner_svc.gguf.architectures import Family
from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.keys import Keys

# Files do not have what llama.cpp has in its code: every fourth layer of SmolLM3 does not rotate, every second or sixth
# of Gemma has no window, and the largest Gemma, identified by its number of layers, scales queries by the width.
_NO_ROPE_INTERVAL = 4
_FULL_INTERVALS = {"gemma2": 2, "gemma3_text": 6}
_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}
_GEMMA2_WINDOW, _GEMMA2_CAPS = 4096, (50.0, 30.0)
_GEMMA3_LOCAL_THETA = 10_000.0


def default_window(family: Family) -> int:
    """Returns the sliding window of a file that has no key for it; 0 for none."""
    return _GEMMA2_WINDOW if family.model_type == "gemma2" else 0


def own_config(keys: Keys, family: Family, config: dict[str, Any], window: int | None) -> dict[str, Any]:
    """Returns the family's own keys, given the common ones in `config`. Raises GgufError for unsupported values."""
    match family.model_type:
        case "gemma2" | "gemma3_text":
            return _gemma(keys, family, config, window)
        case "granite":
            return _granite(keys, config)
    _check_scale(keys, config["head_dim"] ** -0.5)
    activation = {"hidden_act": "silu"}
    layers = config["num_hidden_layers"]
    match family.model_type:
        case "qwen2" | "qwen3":
            kind = "full_attention" if window is None else "sliding_attention"
            return {
                **activation,
                "use_sliding_window": window is not None,
                "sliding_window": window,
                "max_window_layers": 0,
                "layer_types": [kind] * layers,
            }
        case "smollm3":
            return {
                **activation,
                "use_sliding_window": False,
                "sliding_window": None,
                "no_rope_layers": [int((layer + 1) % _NO_ROPE_INTERVAL != 0) for layer in range(layers)],
                "no_rope_layer_interval": _NO_ROPE_INTERVAL,
                "layer_types": ["full_attention"] * layers,
            }
        case "mistral":
            return {**activation, "sliding_window": window}
        case "phi3":
            return {**activation, "sliding_window": window, **_phi3(config)}
    if family.model_type == "gemma":
        return {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}
    if family.model_type == "olmo2":
        _check_head(config, "olmo2")
    return activation


def _check_scale(keys: Keys, expected: float) -> None:
    scale = keys.number(".attention.scale", 0.0, positive=False)
    if scale and not math.isclose(scale, expected, rel_tol=1e-6):
        raise keys.refuse(".attention.scale", f"where the architecture has {expected:.6g}")


def _check_head(config: dict[str, Any], architecture: str) -> None:
    heads, head, hidden = config["num_attention_heads"], config["head_dim"], config["hidden_size"]
    if head * heads != hidden:
        raise GgufError(
            f"Its {heads} heads of {head} don't make up its embedding_length {hidden}, as the architecture "
            f"{architecture!r} has it."
        )


def _phi3(config: dict[str, Any]) -> dict[str, Any]:
    """Returns keys that the class of Phi-3 has outside of the RoPE parameters."""
    _check_head(config, "phi3")
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": original,
    }


def _granite(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    _check_head(config, "granite")
    if not keys.flag(".rope.scaling.finetuned", True):  # in llama.cpp: no rotation
        raise keys.refuse(".rope.scaling.finetuned", "which says that its layers don't rotate")
    return {
        "hidden_act": "silu",
        "attention_multiplier": keys.number(".attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number(".embedding_scale", 1.0),
        "residual_multiplier": keys.number(".residual_scale", 1.0),
        "logits_scaling": keys.number(".logit_scale"),
    }


def _gemma(keys: Keys, family: Family, config: dict[str, Any], window: int | None) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    is_largest = layers == _LARGEST_GEMMA[family.model_type]
    scaled = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    _check_scale(keys, scaled**-0.5)
    if window is None:
        raise GgufError(f"It has no {keys.architecture}.attention.sliding_window, which its layers need.")
    interval = _FULL_INTERVALS[family.model_type]
    kinds = ["sliding_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled,
        "sliding_window": window,
        "layer_types": kinds,
        "attention_bias": False,
    }
    if family.model_type == "gemma2":
        caps = {"attn_logit_softcapping": _GEMMA2_CAPS[0], "final_logit_softcapping": _GEMMA2_CAPS[1]}
        return own | {name: keys.number(f".{name}", cap) for name, cap in caps.items()}
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": keys.number(".rope.freq_base_swa", _GEMMA3_LOCAL_THETA)}
    return own | {
        "final_logit_softcapping": keys.number(".final_logit_softcapping", 0.0, positive=False) or None,
        "attn_logit_softcapping": None,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }
