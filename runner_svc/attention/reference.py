"""Reference paged attention for the tests: one query and one head at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runner_svc.interface.attention_layer import AttentionLayer


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: list[int],
    counts: list[int],
    block_tables: list[list[int]],
    window: int | None,
    scales: Tensor | None = None,
    layer: AttentionLayer | None = None,
) -> Tensor:
    """Attends with queries [T, heads, head_dim] over one layer's cache.

    keys and values are [blocks, block_size, kv_heads, head_dim]. Row r has `counts[r]` queries at positions from
    `starts[r]`. Each query sees the positions up to its own, or only the last `window` of them. The keys and values of
    an FP8 cache are multiplied by `scales` [2, kv_heads]. `layer` gives scale, soft
    cap, sinks and first key, and its window is ignored. Returns float64 [T, heads * head_dim].
    """
    num_queries, num_heads, head_dim = queries.shape
    group_size = num_heads // keys.shape[2]
    layer = layer or AttentionLayer()
    output = torch.zeros(num_queries, num_heads, head_dim, dtype=torch.float64)
    query_index = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        # Both [positions, kv_heads, head_dim], for all positions of the row.
        row_keys, row_values = (_cached(cache, block_tables[row], start + count) for cache in (keys, values))
        if scales is not None:
            row_keys, row_values = row_keys * scales[0, :, None], row_values * scales[1, :, None]
        for position in range(start, start + count):
            first = layer.first if window is None else max(layer.first, position + 1 - window)
            for head in range(num_heads):
                seen = slice(first, position + 1), head // group_size
                query = queries[query_index, head].double()
                output[query_index, head] = _attend(query, row_keys[seen], row_values[seen], layer, head)
            query_index += 1
    return output.reshape(num_queries, -1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, head: int) -> Tensor:
    """Attends with one query [head_dim] over keys and values [seen, head_dim]. Returns [head_dim]."""
    scores = keys @ query * (1 / math.sqrt(len(query)) if layer.scale is None else layer.scale)
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    sink = scores.new_tensor([-math.inf if layer.sinks is None else float(layer.sinks[head])])
    most = torch.cat((scores, sink)).max()
    weights = torch.exp(scores - most)
    return weights / (weights.sum() + torch.exp(sink - most)) @ values


def _cached(cache: Tensor, block_table: list[int], length: int) -> Tensor:
    """Returns the cache entries of a sequence's positions: float64 [length, kv_heads, head_dim]."""
    block_size = cache.shape[1]
    entries = [cache[block_table[position // block_size], position % block_size] for position in range(length)]
    return torch.stack(entries).double()
