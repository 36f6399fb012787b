"""Parameters of rotary position embeddings, from either form of a Hugging Face configuration.

transformers 5 writes `rope_parameters`; earlier versions wrote `rope_theta` and `rope_scaling`. Both become a
`RopeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from runner_svc.model.errors import UnsupportedModel


class RopeType(StrEnum):
    """Scaling of the frequencies beyond the pretraining context."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` dimensions of each head."""

    type: RopeType
    theta: float
    rotary_dim: int
    # Scaling factor of the context, >= 1.
    factor: float = 1.0
    # Context length of pretraining.
    original_positions: int = 0
    # llama3: bounds of the interpolated band, in wavelengths per original context length.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn: the ramp's bounds in rotations, whether to round them to whole dimensions, and the scale of cos and sin.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    # longrope: divisors of the frequencies of sequences up to the pretraining context, and of longer ones.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies of sequences longer than `original_positions` are others."""
        return self.type in (RopeType.DYNAMIC, RopeType.LONGROPE)

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
        """Reads `rope_parameters`, or `rope_scaling` and `rope_theta`. Raises UnsupportedModel for any other type."""
        parameters = _parameters(raw)
        name = parameters.get("rope_type") or parameters.get("type") or "default"
        if name not in set(RopeType):
            supported = ", ".join(RopeType)
            raise UnsupportedModel(f"RoPE type {name!r} is not supported; supported: {supported}.")
        partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
        original = (
            raw.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
            or max_positions
        )
        rope_type = RopeType(name)
        optional = {
            key: parameters[key]
            for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
            if parameters.get(key) is not None
        }
        rotary_dim = int(head_dim * partial)
        if rope_type is RopeType.LONGROPE and original < 2:
            raise UnsupportedModel("RoPE type 'longrope' needs 'original_max_position_embeddings' of at least 2.")
        if rope_type is RopeType.LONGROPE:
            optional |= {f"{name}s": _factors(parameters, name, rotary_dim) for name in ("short_factor", "long_factor")}
        return cls(
            type=rope_type,
            theta=float(parameters.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            rotary_dim=rotary_dim,
            factor=_factor(parameters, rope_type, max_positions / original),
            original_positions=max_positions if rope_type is RopeType.DYNAMIC else original,
            attention_factor=parameters.get("attention_factor"),
            mscale=parameters.get("mscale"),
            mscale_all_dim=parameters.get("mscale_all_dim"),
            **optional,
        )

    def context_length(self, max_positions: int) -> int:
        """Returns the maximum sequence length: `max_position_embeddings`, scaled if that is the unscaled context."""
        if self.type in (RopeType.LINEAR, RopeType.DYNAMIC):
            return int(max_positions * self.factor)
        if self.type is RopeType.YARN:
            return max(max_positions, int(self.original_positions * self.factor))
        return max_positions


def _parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    if not nested:
        return parameters
    if any(value != nested[0] for value in nested):
        raise UnsupportedModel("RoPE parameters that differ by layer type are not supported.")
    return nested[0]


def _factor(parameters: Mapping[str, Any], rope_type: RopeType, implied: float) -> float:
    if rope_type is RopeType.DEFAULT:
        return 1.0
    factor = parameters.get("factor")
    if factor is None and rope_type is RopeType.LONGROPE:
        return max(implied, 1.0)
    if factor is None and rope_type is RopeType.YARN:
        return implied
    if not isinstance(factor, int | float) or factor < 1:
        raise UnsupportedModel(f"RoPE type {rope_type.value!r} needs a 'factor' of at least 1, but it is {factor!r}.")
    return float(factor)


def _factors(parameters: Mapping[str, Any], key: str, rotary_dim: int) -> tuple[float, ...]:
    factors = parameters.get(key)
    if (
        not isinstance(factors, Sequence)
        or len(factors) != rotary_dim // 2
        or not all(isinstance(factor, int | float) and 0 < factor < float("inf") for factor in factors)
    ):
        raise UnsupportedModel(f"RoPE type 'longrope' needs {key!r} to be {rotary_dim // 2} numbers above 0.")
    return tuple(map(float, factors))
