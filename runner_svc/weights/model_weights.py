"""A model's weights, merged as the decoders multiply with them. All are in one type on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.linear_weights import LinearWeights


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """A dense MLP."""

    # [2 * width, hidden_size], the gate first; [width, hidden_size] where there is no gate.
    gate_up: LinearWeights
    down: LinearWeights  # [hidden_size, width]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Norms are as `NormKind` and `QkNorm` say, None where the layer has none."""

    attention_norm: Tensor | None  # before attention
    attention_post_norm: Tensor | None  # after the output product
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: LinearWeights  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    output: LinearWeights  # [hidden_size, num_heads * head_dim]
    mlp_norm: Tensor | None
    mlp_post_norm: Tensor | None
    mlp: MlpWeights | ExpertWeights
    # Of attention, float32 [num_heads].
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model."""

    embeddings: Tensor  # [vocab_size, hidden_size]
    head: Tensor  # [vocab_size, hidden_size]; the embeddings themselves where they are tied
    norm: Tensor
    # To be read once.
    layers: Iterator[LayerWeights]
    # [context_length, hidden_size]: learned positions.
    positions: Tensor | None = None
