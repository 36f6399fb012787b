"""Paged attention by its definition: one query, one head, one key at a time, in float64. The tests' slow twin."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: list[int],
    counts: list[int],
    block_tables: list[list[int]],
    window: int | None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attends with queries [T, heads, head_dim] over one layer's cache.

    keys and values are [blocks, block_size, kv_heads, head_dim]; row r has `counts[r]` queries at positions from
    `starts[r]`, each of which sees the positions up to its own, the last `window` of them where that is set. `scales`
    [2, kv_heads] are what the keys and values of an FP8 cache are in units of. Returns float64 [T, heads * head_dim].
    """
    num_queries, num_heads, head_dim = queries.shape
    group_size = num_heads // keys.shape[2]
    output = torch.zeros(num_queries, num_heads, head_dim, dtype=torch.float64)
    query_index = 0
    for start, count, block_table in zip(starts, counts, block_tables, strict=True):
        for position in range(start, start + count):
            first = 0 if window is None else max(0, position + 1 - window)
            seen_positions = range(first, position + 1)
            for head in range(num_heads):
                kv_head = head // group_size
                key_scale, value_scale = (1.0, 1.0) if scales is None else scales[:, kv_head].tolist()
                output[query_index, head] = _attend(
                    queries[query_index, head].double(),
                    [_cached(keys, block_table, seen)[kv_head].double() * key_scale for seen in seen_positions],
                    [_cached(values, block_table, seen)[kv_head].double() * value_scale for seen in seen_positions],
                )
            query_index += 1
    return output.reshape(num_queries, -1)


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Softmax of scaled dot products, over the values: [head_dim] from [head_dim] and lists of the same."""
    scores = [float(query @ key) / math.sqrt(len(query)) for key in keys]
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights)
    mixed = torch.zeros_like(query)
    for weight, value in zip(weights, values, strict=True):
        mixed += weight / total * value
    return mixed


def _cached(cache: Tensor, block_table: list[int], position: int) -> Tensor:
    """What the cache holds at a sequence's position: [kv_heads, head_dim]."""
    block_size = cache.shape[1]
    return cache[block_table[position // block_size], position % block_size]
