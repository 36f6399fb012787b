"""Converts the rotary embeddings of a GGUF file to the `rope_parameters` of a Hugging Face configuration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner_svc.gguf.architectures import Family
from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.header import TensorInfo
from runner_svc.gguf.keys import Keys
from runner_svc.gguf.parts import Model
from runner_svc.gguf.tensor_data import read_tensor

_THETA = 10_000.0
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# The bounds of the interpolated band in Meta's models.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
# Relative error of factors that were computed in float32.
_ROUNDING = 2e-6


def rope_parameters(keys: Keys, model: Model, head_dim: int, context_length: int, family: Family) -> dict[str, Any]:
    """Returns the parameters, from the keys of `rope` and from the tensors of frequency factors.

    Raises GgufError for a scaling that cannot be expressed exactly.
    """
    theta = keys.number(".rope.freq_base", _THETA)
    rotary_dim = keys.integer(".rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise keys.refuse(".rope.dimension_count", f"which heads of {head_dim} can't have")
    if rotary_dim != head_dim and not family.has_partial_rotation:
        raise keys.refuse(
            ".rope.dimension_count", f"less than the head size {head_dim}, which the architecture doesn't have"
        )
    partial = {} if rotary_dim == head_dim else {"partial_rotary_factor": rotary_dim / head_dim}
    factors = {
        name: _factors(model.tensors[name], rotary_dim // 2)
        for name in (FREQUENCIES, LONG, SHORT)
        if name in model.tensors
    }
    scaling = _scaling(keys, context_length, LONG in factors)
    if scaling["rope_type"] in ("linear", "yarn") and not family.has_scaling:
        raise GgufError(
            f"Its RoPE is scaled ({scaling['rope_type']}), which transformers' {family.model} does not support."
        )
    if factors:
        scaling = _with_factors(keys, factors, scaling, theta, rotary_dim, context_length)
    return {"rope_theta": theta, **scaling, **partial}


def _scaling(keys: Keys, context_length: int, has_factors: bool) -> dict[str, Any]:
    """Returns the scaling by the keys. As in llama.cpp, factors of frequencies need no type, and others are linear."""
    factor = keys.number(".rope.scaling.factor", keys.number(".rope.scale_linear", 1.0))
    kind = keys.text(".rope.scaling.type", "longrope" if has_factors else "linear" if factor != 1.0 else "none")
    original = keys.integer(".rope.scaling.original_context_length", context_length)
    attention = keys.number(".rope.scaling.attn_factor", 1.0)
    if kind == "longrope" and not has_factors:
        raise GgufError(f"Its RoPE is scaled by longrope, but it has no tensor {LONG!r}.")
    if kind != "longrope" and attention != 1.0:
        raise keys.refuse(".rope.scaling.attn_factor", f"which has no defined effect with the scaling {kind!r}")
    fast, slow = keys.number(".rope.scaling.yarn_beta_fast", 32.0), keys.number(".rope.scaling.yarn_beta_slow", 1.0)
    if kind == "longrope":
        return {
            "rope_type": "longrope",
            "factor": context_length / original,
            "attention_factor": attention,
            "original_max_position_embeddings": original,
        }
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if factor < 1.0:
        raise keys.refuse(".rope.scaling.factor", "less than 1")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and keys.number(".rope.freq_base", _THETA) <= 1.0:
        raise keys.refuse(".rope.freq_base", "which yarn can't scale")
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": fast,
            "beta_slow": slow,
        }
    raise keys.refuse(".rope.scaling.type", "which is not known; known are none, linear, yarn and longrope")


def _factors(info: TensorInfo, count: int) -> NDArray[np.float32]:
    if info.shape != (count,) or info.type.name != "F32":
        raise GgufError(
            f"Tensor {info.name!r} is {info.type.name} of {list(info.shape)}; frequencies need F32 of [{count}]."
        )
    numbers = read_tensor(info)
    if not np.isfinite(numbers).all() or (numbers <= 0).any():
        raise GgufError(f"Tensor {info.name!r} has numbers that no frequency can be divided by.")
    return numbers


def _with_factors(
    keys: Keys,
    factors: dict[str, NDArray[np.float32]],
    scaling: dict[str, Any],
    theta: float,
    rotary_dim: int,
    context_length: int,
) -> dict[str, Any]:
    if (FREQUENCIES in factors and len(factors) > 1) or (SHORT in factors) != (LONG in factors):
        raise GgufError(f"It has the tensors {', '.join(sorted(factors))}, of which it is not clear what they mean.")
    if scaling["rope_type"] != ("default" if FREQUENCIES in factors else "longrope"):
        name = next(iter(factors))
        raise GgufError(
            f"It has a tensor {name!r} and the RoPE scaling {scaling['rope_type']!r}, which exclude each other."
        )
    if LONG in factors:
        return {**scaling, "short_factor": factors[SHORT].tolist(), "long_factor": factors[LONG].tolist()}
    given = factors[FREQUENCIES]
    if (given == 1.0).all():
        return scaling
    if (llama3 := _llama3(given, theta, rotary_dim)) is not None:
        return llama3
    # Other factors, the same for texts of any length.
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context_length,
        "short_factor": given.tolist(),
        "long_factor": given.tolist(),
    }


def _llama3(given: NDArray[np.float32], theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """Returns the parameters of llama3 scaling that result in these factors, or None.

    `rope_freqs.weight` holds the divisor of each frequency: 1 for short wavelengths, the factor for long ones, and in
    between 1 / ((1 - s) / factor + s), where s falls linearly with the frequency from 1 to 0.
    """
    factor = float(given.max())
    if factor <= 1.0:
        return None
    rotations = 1.0 / (2 * math.pi * theta ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim))
    candidates = [(float(_ORIGINAL), _LOW, _HIGH)]
    smooth = (1.0 / given.astype(np.float64) - 1.0 / factor) / (1.0 - 1.0 / factor)
    between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    if between.sum() >= 2:
        slope, intercept = np.polyfit(rotations[between], smooth[between], 1)
        if slope > 0 and intercept < 0:
            high = 1.0 - 1.0 / intercept
            candidates += [(slope * (high - 1.0), 1.0, high), (float(round(slope * (high - 1.0))), 1.0, round(high, 3))]
    for original, low, high in candidates:
        if original.is_integer() and _matches(given, rotations * original, factor, low, high):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(original),
            }
    return None


def _matches(given: NDArray[np.float32], rotations: NDArray[Any], factor: float, low: float, high: float) -> bool:
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    made = 1.0 / ((1.0 - smooth) / factor + smooth)
    return bool(np.allclose(given, made, rtol=_ROUNDING, atol=0.0))
