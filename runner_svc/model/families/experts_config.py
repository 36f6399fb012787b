"""A layer's mixture of experts, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate: (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up on both sides."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes and switches of the experts of a layer; immutable.

    A row's k largest logits of the router choose its experts. Its output is the sum of their outputs, each times its
    weight, in the order of the logits.
    """

    num_experts: int
    top_k: int
    width: int
    """Of an expert."""
    softmax_first: bool
    """Weights are those of the softmax over all experts; else of the softmax over the chosen ones."""
    normalize: bool
    """Weights of a row add up to 1; those of a softmax over the chosen ones always do."""
    activation: str
    bias: bool = False
    """The router and the experts' matrices have biases."""
    clamp: ClampedGate | None = None
    """Replaces activation(gate) * up."""
    shared_width: int | None = None
    """Of an expert that computes every row, whose output is multiplied by the sigmoid of a gate of its own."""

    @property
    def gated(self) -> bool:
        """An expert is a gated MLP."""
        return True

    @property
    def num_columns(self) -> int:
        """Columns of the hidden size's width in all matrices."""
        return self.num_experts * (1 + 3 * self.width) + 3 * (self.shared_width or 0)

    def __post_init__(self) -> None:
        """Raises ValueError for experts that no router can choose."""
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"'num_experts_per_tok' must be between 1 and {self.num_experts}, not {self.top_k}")


def qwen3_experts(config: Mapping[str, Any], num_layers: int) -> Sequence[ExpertsConfig | None]:
    """Returns the experts of each layer, None for a dense one. Raises ValueError."""
    return _qwen_experts(config, num_layers, num_experts=128, top_k=8, width=768, shared_width=None)


def qwen2_experts(config: Mapping[str, Any], num_layers: int) -> Sequence[ExpertsConfig | None]:
    """Returns the experts of each layer, None for a dense one. Raises ValueError."""
    shared_width = _count(config, "shared_expert_intermediate_size", 5632)
    return _qwen_experts(config, num_layers, num_experts=60, top_k=4, width=1408, shared_width=shared_width)


def mixtral_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """Returns the experts of all layers. Raises ValueError."""
    return ExpertsConfig(
        num_experts=_num_experts(config, 8),
        top_k=_count(config, "num_experts_per_tok", 2),
        width=_count(config, "intermediate_size", 14336),
        softmax_first=True,
        normalize=True,
        activation=config.get("hidden_act", "silu"),
    )


def gpt_oss_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """Returns the experts of all layers, whose gate ignores `hidden_act`. Raises ValueError."""
    return ExpertsConfig(
        num_experts=_num_experts(config, 128),
        top_k=_count(config, "num_experts_per_tok", 4),
        width=_count(config, "intermediate_size", 2880),
        softmax_first=False,
        normalize=False,
        activation="silu",
        bias=True,
        clamp=ClampedGate(_number(config, "swiglu_alpha", 1.702), _number(config, "swiglu_limit", 7.0)),
    )


def _qwen_experts(
    config: Mapping[str, Any], num_layers: int, *, num_experts: int, top_k: int, width: int, shared_width: int | None
) -> Sequence[ExpertsConfig | None]:
    """The numbers are what the class has where the configuration says nothing."""
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(_is_count(layer, 0) for layer in dense):
        raise ValueError(f"'mlp_only_layers' must be a list of layers, not {dense!r}")
    period = _count(config, "decoder_sparse_step", 1)
    experts = ExpertsConfig(
        num_experts=_num_experts(config, num_experts),
        top_k=_count(config, "num_experts_per_tok", top_k),
        width=_count(config, "moe_intermediate_size", width),
        softmax_first=True,
        normalize=bool(config.get("norm_topk_prob", False)),
        activation=config.get("hidden_act", "silu"),
        shared_width=shared_width,
    )
    return [experts if layer not in dense and (layer + 1) % period == 0 else None for layer in range(num_layers)]


def _num_experts(config: Mapping[str, Any], default: int) -> int:
    """Returns the number under either of its two names."""
    names = [name for name in ("num_experts", "num_local_experts") if name in config]
    counts = {_count(config, name, default) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise ValueError("'num_experts' and 'num_local_experts' must agree, or one of them must be removed")
    return counts.pop()


def _count(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not _is_count(value, 1):
        raise ValueError(f"{key!r} must be a positive integer, not {value!r}")
    return int(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key!r} must be a positive number, not {value!r}")
    return float(value)
