"""One decoder for all supported models, over ragged batches: T concatenated positions of any sequences.

Per layer, as its description says: norm, one QKV product, QK-norm and RoPE, KV write, paged attention, output product,
norm, MLP. Logits are a separate call: only sampling rows need them, and the product with the vocabulary is the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.arithmetic.linear import Linear
from runner_svc.arithmetic.plain import PLAIN, Arithmetic
from runner_svc.decoder.mlp import DenseMlp, ExpertMlp, Mlp
from runner_svc.decoder.norm import DividedNorms, HeadNorm, Norm
from runner_svc.decoder.rope import RotaryEmbedding, Rotation
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.ranks import Communicator
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.description import LayerDescription, MlpDescription, QkNorm
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.rank_exchange import Exchange
from runner_svc.sampling.logit_scaling import finish_logits
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.model_weights import LayerWeights, MlpWeights, ModelWeights
from runner_svc.weights.plain_matrix import PlainMatrix

# Layers with at most this many weights in total (1 GiB in float32) are kept in a plain copy too, which is faster for a
# single sequence. So is their head, if it is quantized: its product would otherwise round to bfloat16.
MAX_PLAIN_WEIGHTS = 2**28


class LayerAttention(Protocol):
    """Planned attention of a step."""

    def __call__(self, layer: int, queries: Tensor, /) -> Tensor:
        """Attends with queries [T, num_heads, head_dim] over the layer's cache. Returns [T, num_heads * head_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderInputs:
    """A step's T positions, int64 [T] each."""

    tokens: Tensor
    positions: Tensor
    # Cache position of each position's keys and values: block * block_size + offset.
    slot_mapping: Tensor
    # Prompt length of each position's sequence, where frequencies depend on it (see RotaryEmbedding).
    prompt_lens: Tensor | None


class DecoderLayer:
    """Attention and MLP of one layer."""

    def __init__(
        self, config: ModelConfig, index: int, weights: LayerWeights, arithmetic: Arithmetic, exchange: Exchange
    ) -> None:
        described = config.layers[index]
        self._summed = exchange.summed
        # One sum of what attention and MLP give, where nothing is between them: the bits of a single rank stay.
        self._sums_once = exchange.is_shared and described.parallel and not described.post_norms
        self._arithmetic = arithmetic
        self._index = index
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._rope = described.rope
        self._is_parallel = described.parallel
        self._multiplier = described.multiplier

        def norm(weights: Tensor | None) -> Callable[[Tensor], Tensor]:
            if weights is None:
                return _unchanged
            return Norm(described.norm, weights, config.norm_eps, arithmetic)

        def head_norm(weights: Tensor) -> HeadNorm:
            return HeadNorm(described.qk_norm, described.norm, weights, config.norm_eps, arithmetic)

        self._attention_norm, self._attention_post_norm = (
            norm(weights.attention_norm),
            norm(weights.attention_post_norm),
        )
        self._mlp_norm, self._mlp_post_norm = norm(weights.mlp_norm), norm(weights.mlp_post_norm)
        self._qk_norms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            if exchange.is_shared and described.qk_norm is QkNorm.PROJECTION:
                both = weights.q_norm, weights.k_norm
                self._qk_norms = DividedNorms(config, both, exchange.summed, arithmetic)
            else:
                of_queries, of_keys = head_norm(weights.q_norm), head_norm(weights.k_norm)
                self._qk_norms = lambda queries, keys: (of_queries(queries), of_keys(keys))
        keep_plain = config.num_layer_weights <= MAX_PLAIN_WEIGHTS
        self._qkv = Linear(weights.qkv, keep_plain=keep_plain, arithmetic=arithmetic)
        self._output = Linear(weights.output, keep_plain=keep_plain, arithmetic=arithmetic)
        self._mlp = make_mlp(described, weights, keep_plain=keep_plain, arithmetic=arithmetic)

    def forward(
        self,
        hidden: Tensor,
        slot_mapping: Tensor,
        rotations: Sequence[Rotation],
        cache: KVCache,
        attention: LayerAttention,
    ) -> Tensor:
        """Returns the residual stream [T, hidden_size] after this layer."""
        normed = self._attention_norm(hidden)
        queries = self._project(normed, slot_mapping, rotations, cache)
        attended = self._output(attention(self._index, queries))
        if self._sums_once:
            return self._arithmetic.add(hidden, self._summed(attended + self._mlp(normed)), self._multiplier)
        attended = self._attention_post_norm(self._summed(attended))
        hidden = self._arithmetic.add(hidden, attended, self._multiplier)
        if not self._is_parallel:
            normed = self._mlp_norm(hidden)
        return self._arithmetic.add(hidden, self._mlp_post_norm(self._summed(self._mlp(normed))), self._multiplier)

    def _project(self, normed: Tensor, slot_mapping: Tensor, rotations: Sequence[Rotation], cache: KVCache) -> Tensor:
        """Writes the step's keys and values into the cache; returns the queries [T, num_heads, head_dim]."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = self._qkv(normed).view(-1, heads + 2 * kv_heads, self._head_dim)
        rotated = qkv[:, : heads + kv_heads]  # queries and keys are adjacent: one rotation for both
        if self._qk_norms is not None:
            rotated = torch.cat(self._qk_norms(rotated[:, :heads], rotated[:, heads:]), dim=1)
        if self._rope is not None:
            rotated = rotations[self._rope].apply(rotated, self._arithmetic)
        cache.write(self._index, rotated[:, heads:].flatten(1), qkv[:, heads + kv_heads :].flatten(1), slot_mapping)
        return rotated[:, :heads]


class Decoder:
    """The model: embeddings, layers, final norm, head."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        arithmetic: Arithmetic = PLAIN,
        ranks: Communicator | None = None,
    ) -> None:
        """`config` and `weights` are a rank's part if there are `ranks`, which compute every call together."""
        self.embeddings = weights.embeddings
        """The rank's rows of the table."""
        self._exchange = Exchange(ranks, in_order=arithmetic.adds_in_order)
        self.taps: tuple[int, ...] = ()
        """Layers whose inputs `forward` leaves in `tapped`; one behind the last stands for its output."""
        self.tapped: list[Tensor] = []
        """[T, hidden_size] each, in the order of the layers."""
        self._positions = weights.positions
        self._layers: list[DecoderLayer] = []
        sinks: list[Tensor | None] = []
        for index, layer in enumerate(weights.layers):
            self._layers.append(DecoderLayer(config, index, layer, arithmetic, self._exchange))
            sinks.append(layer.sinks)
        self.config = replace(config, sinks=tuple(sinks))
        self._norm = Norm(config.norm, weights.norm, config.norm_eps, arithmetic)
        # A second copy of a plain head would make no logit more exact.
        keep_plain = config.num_layer_weights <= MAX_PLAIN_WEIGHTS and not isinstance(weights.head.matrix, PlainMatrix)
        self._head = Linear(weights.head, keep_plain=keep_plain, arithmetic=arithmetic)
        self._ropes = [RotaryEmbedding(rope, weights.embeddings.device) for rope in config.ropes]

    def forward(self, inputs: DecoderInputs, cache: KVCache, attention: LayerAttention) -> Tensor:
        """Writes the KV of all positions; returns the residual stream [T, hidden_size], which `logits` reads."""
        hidden = self.embed(inputs.tokens)
        if self.config.model.embedding_scale != 1.0:
            hidden = hidden * self.config.model.embedding_scale
        if self._positions is not None:
            hidden = hidden + functional.embedding(inputs.positions, self._positions)
        rotations = [rope.rotation(inputs.positions, inputs.prompt_lens) for rope in self._ropes]
        states = [hidden] if self.taps else None
        for layer in self._layers:
            hidden = layer.forward(hidden, inputs.slot_mapping, rotations, cache, attention)
            if states is not None:
                states.append(hidden)
        if states is not None:
            self.tapped = [states[index] for index in self.taps]
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """See `ServedDecoder`."""
        return self._exchange.looked_up(tokens, self.embeddings, self.config.vocabulary)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] for L positions of the residual stream, [L, hidden_size]."""
        return self.head(self.final_states(hidden))

    def final_states(self, hidden: Tensor) -> Tensor:
        """See `ServedDecoder`."""
        return self._norm(hidden)

    def head(self, states: Tensor) -> Tensor:
        """See `ServedDecoder`."""
        logits = self._exchange.side_by_side(self._head(states).float(), self.config.vocab_size)
        finish_logits(logits, self.config.model)
        return logits


def make_mlp(
    described: LayerDescription, weights: LayerWeights, *, keep_plain: bool, arithmetic: Arithmetic = PLAIN
) -> Mlp:
    """Returns the MLP of a layer. Raises TypeError for weights of another kind than the description's."""
    if isinstance(described.mlp, ExpertsConfig) and isinstance(weights.mlp, ExpertWeights):
        return ExpertMlp(described.mlp, weights.mlp, keep_plain=keep_plain, arithmetic=arithmetic)
    if isinstance(described.mlp, MlpDescription) and isinstance(weights.mlp, MlpWeights):
        return DenseMlp(described.mlp, weights.mlp, keep_plain=keep_plain, arithmetic=arithmetic)
    raise TypeError("the layer's weights are not of the kind that its description says")


def _unchanged(x: Tensor) -> Tensor:
    return x
