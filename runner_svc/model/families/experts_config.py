"""A layer's mixture of experts, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate: (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above and up on both sides."""

    alpha: float
    limit: float


class Scoring(StrEnum):
    """What a row's logits become: scores, the largest of which choose its experts and weigh them."""

    SOFTMAX = "softmax"
    """Of all experts."""
    SOFTMAX_OF_CHOSEN = "softmax of the chosen"
    """Weights, which add up to 1, are those of the softmax over the chosen experts alone."""
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How a router's logits choose experts and weigh them; the defaults are Qwen's."""

    scoring: Scoring = Scoring.SOFTMAX
    normalize: bool = False
    """The scores of a row's experts are divided by their sum; see `SIGMOID_SUM` and `least_sum`."""
    least_sum: float = 0.0
    """Of softmax scores: what they are divided by at least."""
    scale: float = 1.0
    """Factor of all weights."""
    is_corrected: bool = False
    """Each expert has a number that is added to its score when experts are chosen, and not when they are weighed."""
    groups: int = 1
    """Experts, in order, are in groups of equal size; a group's score is the sum of its two largest."""
    top_groups: int = 1
    """Experts are chosen of this many groups, those with the largest scores."""
    is_exact: bool = False
    """The router's product is in float32 where its matrix is stored in float32."""

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError for groups out of which that many experts can't be chosen."""
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"'topk_group' must be between 1 and {self.groups} ('n_group'), not {self.top_groups}")
        if self.groups == 1:
            return
        if num_experts % self.groups or num_experts < 2 * self.groups:
            raise ValueError(f"{num_experts} experts can't be in {self.groups} equal groups ('n_group') of at least 2")
        of_chosen = num_experts // self.groups * self.top_groups
        if top_k > of_chosen:
            raise ValueError(
                f"'num_experts_per_tok' {top_k} is more than the {of_chosen} experts of 'topk_group' groups"
            )


SIGMOID_SUM = 1e-20
"""Added to what sigmoid scores are divided by, which may be 0."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes and switches of the experts of a layer; immutable.

    A row's output is the sum of the outputs of the k experts that the router chooses, each times its weight, in the
    order of the choice.
    """

    num_experts: int
    top_k: int
    width: int
    """Of an expert."""
    router: RouterConfig
    activation: str
    bias: bool = False
    """The router and the experts' matrices have biases."""
    clamp: ClampedGate | None = None
    """Replaces activation(gate) * up."""
    shared_width: int | None = None
    """Of an expert that computes every row."""
    shared_gate: bool = True
    """The shared expert's output is multiplied by the sigmoid of a gate of its own."""

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
        self.router.check(self.num_experts, self.top_k)
        if self.bias and self.router.is_corrected:
            raise ValueError("a router with biases and corrections is not supported")


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
        router=RouterConfig(normalize=True),
        activation=config.get("hidden_act", "silu"),
    )


def gpt_oss_experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """Returns the experts of all layers, whose gate ignores `hidden_act`. Raises ValueError."""
    return ExpertsConfig(
        num_experts=_num_experts(config, 128),
        top_k=_count(config, "num_experts_per_tok", 4),
        width=_count(config, "intermediate_size", 2880),
        router=RouterConfig(Scoring.SOFTMAX_OF_CHOSEN),
        activation="silu",
        bias=True,
        clamp=ClampedGate(_number(config, "swiglu_alpha", 1.702), _number(config, "swiglu_limit", 7.0)),
    )


def sigmoid_experts(config: Mapping[str, Any], num_layers: int) -> Sequence[ExpertsConfig | None]:
    """Returns the experts of each layer, None for a dense one, as of DeepSeek-V3. Raises ValueError."""
    width = _count(config, "moe_intermediate_size", 1408)
    experts = ExpertsConfig(
        num_experts=_required(config, "n_routed_experts"),
        top_k=_required(config, "num_experts_per_tok"),
        width=width,
        router=RouterConfig(
            Scoring.SIGMOID,
            normalize=bool(config.get("norm_topk_prob", False)),
            scale=_factor(config, "routed_scaling_factor", 1.0),
            is_corrected=True,
            groups=_count(config, "n_group", 1),
            top_groups=_count(config, "topk_group", 1),
            is_exact=True,
        ),
        activation=config.get("hidden_act", "silu"),
        shared_width=width * _required(config, "n_shared_experts"),
        shared_gate=False,
    )
    dense = _integer(config, "first_k_dense_replace", 0)
    return [experts if layer >= dense else None for layer in range(num_layers)]


def ernie_experts(config: Mapping[str, Any], num_layers: int) -> Sequence[ExpertsConfig | None]:
    """Returns the experts of each layer, None for a dense one. Raises ValueError."""
    width, shared = _count(config, "moe_intermediate_size", 1536), _integer(config, "moe_num_shared_experts", 2)
    experts = ExpertsConfig(
        num_experts=_count(config, "moe_num_experts", 64),
        top_k=_count(config, "moe_k", 6),
        width=width,
        router=RouterConfig(
            normalize=True,
            least_sum=_factor(config, "moe_norm_min", 1e-12),
            is_corrected=True,
            is_exact=True,
        ),
        activation=config.get("hidden_act", "silu"),
        shared_width=width * shared if shared > 0 else None,
        shared_gate=False,
    )
    first, last = _integer(config, "moe_layer_start_index", 1), _integer(config, "moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else last
    period = _count(config, "moe_layer_interval", 1)
    return [experts if (layer + 1) % period == 0 and first <= layer <= last else None for layer in range(num_layers)]


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
        router=RouterConfig(normalize=bool(config.get("norm_topk_prob", False))),
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


def _required(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise ValueError(f"its config.json needs a positive integer {key!r}")
    return _count(config, key, 0)


def _integer(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key!r} must be an integer, not {value!r}")
    return value


def _factor(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{key!r} must be a number of at least 0, not {value!r}")
    return float(value)


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
