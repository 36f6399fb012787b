"""A model's weights, merged as the decoders multiply with them. All are in one type on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """A dense MLP."""

    # [2 * width, hidden_size], the gate first; [width, hidden_size] where there is no gate.
    gate_up: LinearWeights
    down: LinearWeights  # [hidden_size, width]

    def mapped(self, change: Callable[[Matrix], Matrix]) -> MlpWeights:
        """Returns those with other matrices."""
        return MlpWeights(self.gate_up.mapped(change), self.down.mapped(change))


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

    def mapped(self, change: Callable[[Matrix], Matrix]) -> LayerWeights:
        """Returns those with other matrices."""
        qkv, output = self.qkv.mapped(change), self.output.mapped(change)
        return replace(self, qkv=qkv, output=output, mlp=self.mlp.mapped(change))


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """A whole model."""

    embeddings: Tensor  # [vocab_size, hidden_size]
    head: LinearWeights  # [vocab_size, hidden_size]; plain ones are the embeddings themselves where they are tied
    norm: Tensor
    # To be read once.
    layers: Iterator[LayerWeights]
    # [context_length, hidden_size]: learned positions.
    positions: Tensor | None = None
