"""One decoder for all supported models, over ragged batches: T concatenated positions of any sequences.

Per layer: RMSNorm, one QKV product, QK-norm and RoPE, KV write, paged attention, output product, RMSNorm, one gate-up
product, SiLU times up, down product. Logits are a separate call: only sampling rows need them, and the product with the
vocabulary is the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.linear import Linear
from runner_svc.decoder.rope import RotaryEmbedding, Rotation
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.config import ModelConfig
from runner_svc.model.weights import LayerWeights, ModelWeights

# Layers with at most this many weights in total (1 GiB in float32) are kept in a plain copy too, which is faster for a
# single sequence.
MAX_PLAIN_WEIGHTS = 2**28


class LayerAttention(Protocol):
    """Planned attention of a step."""

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        """Attends with queries [T, num_heads, head_dim] over the layer's cache. Returns [T, num_heads * head_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderInputs:
    """A step's T positions, all int64 [T]."""

    tokens: Tensor
    positions: Tensor
    # Cache position of each position's keys and values: block * block_size + offset.
    slot_mapping: Tensor
    # Prompt length of each position's sequence (see RotaryEmbedding).
    prompt_lens: Tensor


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class DecoderLayer:
    """Attention and MLP of one layer."""

    def __init__(self, config: ModelConfig, index: int, weights: LayerWeights) -> None:
        self._index = index
        self._eps = config.rms_norm_eps
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._rotates = config.rotary_layers[index]
        self._activation = ACTIVATION_FUNCTIONS[config.activation]
        self._attention_norm = weights.attention_norm
        self._mlp_norm = weights.mlp_norm
        self._q_norm = weights.q_norm
        self._k_norm = weights.k_norm
        keep_plain = config.num_layer_weights <= MAX_PLAIN_WEIGHTS
        self._qkv = Linear(weights.qkv, weights.qkv_bias, keep_plain=keep_plain)
        self._output = Linear(weights.output, weights.output_bias, keep_plain=keep_plain)
        self._gate_up = Linear(weights.gate_up, weights.gate_up_bias, keep_plain=keep_plain)
        self._down = Linear(weights.down, weights.down_bias, keep_plain=keep_plain)

    def forward(
        self, hidden: Tensor, slot_mapping: Tensor, rotation: Rotation, cache: KVCache, attention: LayerAttention
    ) -> Tensor:
        """Returns the residual stream [T, hidden_size] after this layer."""
        normed = functional.rms_norm(hidden, self._attention_norm.shape, self._attention_norm, self._eps)
        queries = self._project(normed, slot_mapping, rotation, cache)
        hidden = hidden + self._output(attention(self._index, queries))
        normed = functional.rms_norm(hidden, self._mlp_norm.shape, self._mlp_norm, self._eps)
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        return hidden + self._down(self._activation(gate).mul_(up))

    def _project(self, normed: Tensor, slot_mapping: Tensor, rotation: Rotation, cache: KVCache) -> Tensor:
        """Writes the step's keys and values into the cache; returns the queries [T, num_heads, head_dim]."""
        heads, kv_heads = self._num_heads, self._num_kv_heads
        qkv = self._qkv(normed).view(-1, heads + 2 * kv_heads, self._head_dim)
        rotated = qkv[:, : heads + kv_heads]  # queries and keys are adjacent: one rotation for both
        if self._q_norm is not None and self._k_norm is not None:
            shape = (self._head_dim,)
            rotated = torch.cat(
                (
                    functional.rms_norm(rotated[:, :heads], shape, self._q_norm, self._eps),
                    functional.rms_norm(rotated[:, heads:], shape, self._k_norm, self._eps),
                ),
                dim=1,
            )
        if self._rotates:
            rotated = rotation.apply(rotated)
        cache.write(self._index, rotated[:, heads:].flatten(1), qkv[:, heads + kv_heads :].flatten(1), slot_mapping)
        return rotated[:, :heads]


class Decoder:
    """The model: embeddings, layers, final norm, head."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self._embeddings = weights.embeddings
        self._layers = [DecoderLayer(config, index, layer) for index, layer in enumerate(weights.layers)]
        self._norm = weights.norm
        self._head = Linear(weights.head)
        self._rope = RotaryEmbedding(config.rope, weights.embeddings.device)

    def forward(self, inputs: DecoderInputs, cache: KVCache, attention: LayerAttention) -> Tensor:
        """Writes the KV of all positions; returns the residual stream [T, hidden_size], which `logits` reads."""
        hidden = functional.embedding(inputs.tokens, self._embeddings)
        rotation = self._rope.rotation(inputs.positions, inputs.prompt_lens)
        for layer in self._layers:
            hidden = layer.forward(hidden, inputs.slot_mapping, rotation, cache, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] for L positions of the residual stream, [L, hidden_size]."""
        normed = functional.rms_norm(hidden, self._norm.shape, self._norm, self.config.rms_norm_eps)
        return self._head(normed).float()
