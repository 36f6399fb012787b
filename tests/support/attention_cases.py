"""Random batches over a paged cache, and the float32 attention over them: the reference for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from runner_svc.interface.kv_cache import FP8, KVCache


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Rows with `counts` queries each at the end of `lengths` positions, and the model's kind of attention."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    head_dim: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    # Scale of the scores; None: 1 / sqrt(head_dim).
    scale: float | None = None
    # Dtype of queries and output, and of the cache unless that is FP8.
    dtype: torch.dtype = torch.bfloat16
    fp8_cache: bool = False
    # Factor of a row's first key; falls linearly to 1 at the last, so that scores grow towards the first.
    first_key: float = 1.0
    # Whether each head has a sink.
    sinks: bool = False
    # Positions before it are seen by no query, and are NaN; only of verify rows.
    first: int = 0


class AttentionBatch:
    """A case with its tensors: a cache that is NaN outside the rows' positions, and shuffled block tables."""

    def __init__(self, case: AttentionCase, seed: int, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(seed)
        block_size = case.block_size
        blocks_of_row = [-(-length // block_size) for length in case.lengths]
        num_blocks = sum(blocks_of_row) + 1
        config = SimpleNamespace(num_layers=1, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim)
        scales = None
        if case.fp8_cache:
            scales = 0.05 * torch.rand(1, 2, case.num_kv_heads, generator=generator, device=device) + 0.02
        cache_dtype = FP8 if case.fp8_cache else case.dtype
        self.cache = KVCache(config, num_blocks, block_size, cache_dtype, device, scales)
        self.cache.data.view(torch.uint8).fill_(0x7F if case.fp8_cache else 0xFF)  # NaN
        ids = np.random.default_rng(seed).permutation(num_blocks - 1) + 1
        tables = np.zeros((len(case.lengths) + 1, max(blocks_of_row) + 1), np.int32)
        for row, (blocks, length) in enumerate(zip(blocks_of_row, case.lengths, strict=True)):
            tables[row, :blocks], ids = ids[:blocks], ids[blocks:]
            for position in range(0, length, block_size):
                shape = (2, min(block_size, length - position), case.num_kv_heads, case.head_dim)
                data = torch.randn(shape, generator=generator, device=device, dtype=case.dtype)
                data[0] *= case.first_key + (1 - case.first_key) * position / length
                if scales is not None:
                    data = (data.float() / scales[0, :, None, :, None]).to(FP8)
                written = self.cache.data[0, :, tables[row, position // block_size], : shape[1]]
                written.view(torch.uint8).copy_(data.view(torch.uint8))
            for position in range(min(case.first, length)):
                block = self.cache.data[0, :, tables[row, position // block_size], position % block_size]
                block.view(torch.uint8).fill_(0x7F if case.fp8_cache else 0xFF)
        self.host_tables = tables
        self.block_tables = torch.from_numpy(tables).to(device)
        shape = (sum(case.counts), case.num_heads, case.head_dim)
        # Three times the usual size makes some keys stand out; a flat softmax would hide errors.
        self.queries = 3 * torch.randn(shape, generator=generator, device=device, dtype=case.dtype)
        self.output = torch.full_like(self.queries, float("nan"))
        # As large as the larger scores, so that a sink takes a good part of a head's weight.
        self.sinks = 3 * torch.randn(case.num_heads, generator=generator, device=device) if case.sinks else None

    @property
    def lengths(self) -> np.ndarray:
        return np.array(self.case.lengths, np.int32)

    @property
    def counts(self) -> np.ndarray:
        return np.array(self.case.counts, np.int32)

    @property
    def query_rows(self) -> np.ndarray:
        """First query of each row."""
        return (np.cumsum(self.counts) - self.counts).astype(np.int32)

    @property
    def table_rows(self) -> np.ndarray:
        return np.arange(len(self.case.lengths), dtype=np.int32)

    def expected(self) -> Tensor:
        """Returns the expected output, float32 [T, num_heads, head_dim]."""
        outputs, first = [], 0
        for row, (length, count) in enumerate(zip(self.case.lengths, self.case.counts, strict=True)):
            outputs.append(self._attend(row, length, self.queries[first : first + count].float()))
            first += count
        return torch.cat(outputs)

    def _attend(self, row: int, length: int, queries: Tensor) -> Tensor:
        case = self.case
        if length == 0:
            return torch.zeros_like(queries)
        blocks = self.block_tables[row, : -(-length // case.block_size)].long()
        group = case.num_heads // case.num_kv_heads
        keys, values = (
            half.view(torch.uint8)[blocks].view(half.dtype).flatten(0, 1)[:length].float()
            for half in self.cache.data[0]
        )
        if self.cache.scales is not None:
            keys, values = keys * self.cache.scales[0, 0, :, None], values * self.cache.scales[0, 1, :, None]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (case.scale or case.head_dim**-0.5)
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        positions = torch.arange(length - len(queries), length, device=queries.device)[:, None]
        distance = positions - torch.arange(length, device=queries.device)
        hidden = distance < 0 if case.window is None else (distance < 0) | (distance >= case.window)
        hidden = hidden | (torch.arange(length, device=queries.device) < case.first)
        values = values.masked_fill(values.isnan(), 0.0) if case.first else values
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None, None].expand(-1, len(queries), 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values)
