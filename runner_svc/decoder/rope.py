"""Rotary position embeddings: frequencies by scaling type, cos and sin of a step's positions, and the rotation.

Formulas follow the papers as implemented in transformers (Apache-2.0, `modeling_rope_utils.py`), in float32. cos and
sin are computed once per step for its T positions: that takes microseconds and avoids a table of the whole context.
Rotation pairs halves (dimension i with i + rotary_dim / 2), as checkpoints expect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.arithmetic.plain import PLAIN, Arithmetic
from runner_svc.model.rope_config import RopeConfig, RopeType


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """cos and sin of a step's positions, float32 [T, 1, rotary_dim]; the first half of `sin` is negated."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor, arithmetic: Arithmetic = PLAIN) -> Tensor:
        """Rotates the first rotary_dim dimensions of x [T, heads, head_dim]; returns a tensor of the same shape."""
        rotary_dim = self.cos.shape[-1]
        if rotary_dim == x.shape[-1]:
            return self._rotate(x, arithmetic)
        rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
        return torch.cat((self._rotate(rotated, arithmetic), passed), dim=-1)

    def _rotate(self, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        return arithmetic.add_product(x * self.cos, swapped, self.sin)


class RotaryEmbedding:
    """Frequencies of one model."""

    def __init__(self, config: RopeConfig, device: torch.device) -> None:
        self._config = config
        self._exponents = torch.arange(0, config.rotary_dim, 2, device=device).float() / config.rotary_dim
        self._inv_freq, self._scale = _frequencies(config, self._exponents)
        if config.type is RopeType.LONGROPE:
            self._long_inv_freq = _longrope(config.long_factors, config, self._exponents)

    def rotation(self, positions: Tensor, prompt_lens: Tensor | None) -> Rotation:
        """Returns cos and sin for int64 `positions` [T] of sequences whose prompts have `prompt_lens` [T] tokens.

        Only scaling that depends on the length of the sequence needs prompt_lens. For a prompt token that is the whole
        prompt's length, however it is cut into chunks; for a generated token, its position + 1. Keys that are cached
        keep the frequencies that they have, as in transformers' `generate`.
        """
        if not self._config.depends_on_length:
            return self._of_frequencies(positions, self._inv_freq)
        assert prompt_lens is not None, "frequencies depend on the length"
        lengths = torch.maximum(positions + 1, prompt_lens)
        if self._config.type is RopeType.DYNAMIC:
            return self._of_frequencies(positions, self._dynamic_frequencies(lengths))
        is_long = (lengths > self._config.original_positions).unsqueeze(-1)
        return self._of_frequencies(positions, torch.where(is_long, self._long_inv_freq, self._inv_freq))

    def _of_frequencies(self, positions: Tensor, inv_freq: Tensor) -> Rotation:
        angles = positions.unsqueeze(-1).float() * inv_freq
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return Rotation(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))

    def _dynamic_frequencies(self, lengths: Tensor) -> Tensor:
        """Returns float32 [T, rotary_dim / 2]: NTK-aware frequencies for sequences of `lengths` [T]."""
        config = self._config
        beyond = lengths.clamp(min=config.original_positions)
        growth = (config.factor * beyond / config.original_positions) - (config.factor - 1)
        base = config.theta * growth ** (config.rotary_dim / (config.rotary_dim - 2))
        return 1.0 / (base.unsqueeze(-1) ** self._exponents)


def _frequencies(config: RopeConfig, exponents: Tensor) -> tuple[Tensor, float]:
    """Returns inverse frequencies, float32 [rotary_dim / 2], and the scale of cos and sin."""
    inv_freq = 1.0 / (config.theta**exponents)
    if config.type is RopeType.LINEAR:
        return inv_freq / config.factor, 1.0
    if config.type is RopeType.LLAMA3:
        return _llama3(config, inv_freq), 1.0
    if config.type is RopeType.LONGROPE:
        return _longrope(config.short_factors, config, exponents), _longrope_scale(config)
    if config.type is RopeType.YARN:
        return _yarn(config, inv_freq), _yarn_scale(config)
    return inv_freq, 1.0


def _llama3(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: divides frequencies of long wavelengths by the factor, keeps short ones, interpolates in between."""
    wavelengths = 2 * math.pi / inv_freq
    rotations = config.original_positions / wavelengths
    smooth = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    interpolated = (1 - smooth) * inv_freq / config.factor + smooth * inv_freq
    scaled = torch.where(rotations < config.low_freq_factor, inv_freq / config.factor, interpolated)
    return torch.where(rotations > config.high_freq_factor, inv_freq, scaled)


def _longrope(factors: Sequence[float], config: RopeConfig, exponents: Tensor) -> Tensor:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency."""
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=exponents.device) * config.theta**exponents)


def _longrope_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_positions))


def _yarn(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): a ramp over dimensions from extrapolation (fast) to interpolation (slow)."""

    def dimension(rotations: float) -> float:
        wavelengths = config.original_positions / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of width 0 would divide by zero
    dimensions = torch.arange(inv_freq.shape[0], dtype=torch.float32, device=inv_freq.device)
    interpolation = ((dimensions - low) / (high - low)).clamp(0, 1)
    return inv_freq / config.factor * interpolation + inv_freq * (1 - interpolation)


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
