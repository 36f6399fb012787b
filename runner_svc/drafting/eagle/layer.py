"""EAGLE's draft layer: what it reads, its paged KV, and its output for one position of each row.

At position p it reads the embedding of token p and the model's state at p - 1; there is nothing to read at position 0.
So its KV at a position depends on the tokens up to it alone, as the model's does, and blocks are shared alike. Keys
rotate by p - 1, the place of the pair in EAGLE's own counting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.rope import RotaryEmbedding
from runner_svc.drafting.eagle.checkpoint import EagleWeights


class EagleLayer:
    """The layer and its KV, on the device and in the dtype of its weights."""

    def __init__(self, weights: EagleWeights, embed: Callable[[Tensor], Tensor], cache: Tensor) -> None:
        """`embed` returns the embeddings [T, H] of tokens, int64 [T]: those of the model, if the layer has none.

        `cache` [2, positions, kv_heads, head_dim]: room for keys and values.
        """
        self._weights = weights
        own = weights.embeddings
        self._embed = embed if own is None else lambda tokens: functional.embedding(tokens, own)
        config = weights.config
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._rope = RotaryEmbedding(config.ropes[0], weights.qkv.device)
        self.cache = cache

    def fused(self, states: Tensor) -> Tensor:
        """Returns what the layer keeps of the model's states [T, ...]: [T, H]."""
        return functional.linear(states, self._weights.fuse) if self._weights.is_third else states

    def write(self, tokens: Tensor, states: Tensor, positions: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the KV of T positions at `places` [T] of the cache.

        `tokens`, `positions`: int64 [T], positions from 1 on. `states` [T, H]: those before, as `fused` or `step`
        return them. Returns the queries [T, heads, head_dim] and the residual stream [T, H] before attention.
        """
        weights, embedded = self._weights, self._embed(tokens)
        if weights.is_third:
            normed = self._norm(states, weights.state_norm)
            residual = normed if weights.norm_before_residual else states
            read = torch.cat((self._norm(embedded, weights.embedding_norm), normed), dim=-1)
        else:
            read = functional.linear(torch.cat((embedded, states), dim=-1), weights.fuse, weights.fuse_bias)
            residual = read
        qkv = functional.linear(read, weights.qkv).view(len(tokens), -1, self._head_dim)
        rotation = self._rope.rotation(positions - 1, None)
        rotated = rotation.apply(qkv[:, : self._heads + self._kv_heads].float()).to(qkv.dtype)
        self.cache[0, places] = rotated[:, self._heads :]
        self.cache[1, places] = qkv[:, self._heads + self._kv_heads :]
        return rotated[:, : self._heads], residual

    def step(self, tokens: Tensor, states: Tensor, positions: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """Writes the KV of one position of each row; returns the layer's output there, [L, H]: the next state.

        `contexts` [L]: the places of positions 1 to its own of each row, int64.
        """
        queries, residual = self.write(tokens, states, positions, torch.stack([places[-1] for places in contexts]))
        return self.after(
            residual, torch.stack([self._attended(*pair) for pair in zip(queries, contexts, strict=True)])
        )

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Returns the layer's output for the residual stream [L, H] before attention and attention's output."""
        hidden = residual + functional.linear(attended, self._weights.output)
        gate, up = functional.linear(self._norm(hidden, self._weights.norm), self._weights.gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, self._weights.down)

    def head(self, states: Tensor) -> Tensor:
        """Returns EAGLE-3's logits of its own ids, for outputs [L, H]."""
        assert self._weights.head is not None
        return functional.linear(self._norm(states, self._weights.last_norm), self._weights.head)

    def _attended(self, query: Tensor, places: Tensor) -> Tensor:
        """Returns attention's output [heads * head_dim] of one query [heads, head_dim] over `places` of the cache."""
        keys, values = self.cache[:, places].repeat_interleave(self._heads // self._kv_heads, dim=2)
        attended = functional.scaled_dot_product_attention(
            query.unsqueeze(1), keys.transpose(0, 1), values.transpose(0, 1)
        )
        return attended.flatten()

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self._weights.config.norm_eps)
