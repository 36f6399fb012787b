"""Attention in plain torch on the CPU, for `host_device`; decode and prefill share one kind of plan."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.attention.reference import paged_attention
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows, VerifyRows
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.config import ModelConfig


class HostAttention:
    """A plan is the number of rows, then start, count, table row and first query of each row."""

    def __init__(
        self, cache: KVCache, tables: Tensor, config: ModelConfig, max_batch: int, layers: Sequence[AttentionLayer]
    ) -> None:
        self._cache, self._tables, self._config, self._max_batch = cache, tables, config, max_batch
        self._layers = layers

    def decode_plan_words(self, batch: int) -> int:
        assert batch <= self._max_batch
        return 8 + 8 * batch

    def plan_decode(
        self,
        lengths: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
        query_rows: NDArray[np.int32] | None = None,
        batch: int | None = None,
    ) -> None:
        assert len(plan) == self.decode_plan_words(batch or len(lengths))
        rows = np.arange(len(lengths)) if query_rows is None else query_rows
        _write_rows(lengths - 1, np.ones_like(lengths), table_rows, rows.astype(np.int32), plan)

    def run_decode(self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, batch: int) -> None:
        self._run(layer, queries, output, plan, self.decode_plan_words(batch))

    def prefill_plan_words(self, num_tokens: int, num_rows: int) -> int:
        return 8 + 8 * num_rows

    def mixed_plan_words(self, batch: int, prefill_words: int) -> int:
        return (self.decode_plan_words(batch) if batch else 0) + prefill_words

    def plan_mixed(
        self,
        decode: DecodeRows | VerifyRows,
        prefill: PrefillRows,
        plan: NDArray[np.int32],
        batch: int,
        prefill_words: int,
    ) -> None:
        assert len(plan) == self.mixed_plan_words(batch, prefill_words)
        words = len(plan) - prefill_words
        if batch and isinstance(decode, VerifyRows):
            self.plan_verify(decode, plan[:words], batch, 1)
        elif batch:
            ones = np.ones_like(decode.lengths)
            _write_rows(decode.lengths - 1, ones, decode.table_rows, decode.query_rows, plan[:words])
        if prefill_words:
            _write_rows(prefill.starts, prefill.counts, prefill.table_rows, prefill.query_rows, plan[words:])

    def run_mixed(
        self,
        stream: int,
        layer: int,
        queries: Tensor,
        output: Tensor,
        plan: int,
        batch: int,
        prefill_words: int,
        counters: Tensor | None = None,
    ) -> None:
        words = self.mixed_plan_words(batch, 0)
        if batch and counters is not None:
            self.run_verify(stream, layer, queries, output, plan, batch, 1, counters, None)
        elif batch:
            self._run(layer, queries, output, plan, words)
        if prefill_words:
            self._run(layer, queries, output, plan + 4 * words, prefill_words)

    def verify_plan_words(self, batch: int, positions: int) -> int:
        assert batch <= self._max_batch
        return 8 + 8 * batch

    def plan_verify(self, rows: VerifyRows, plan: NDArray[np.int32], batch: int, positions: int) -> None:
        assert len(plan) == self.verify_plan_words(batch, positions)
        assert (rows.lowers >= 1).all() and (rows.lowers <= rows.uppers).all()
        _write_rows(rows.lowers, rows.uppers, rows.table_rows, rows.query_rows, plan)

    def run_verify(
        self,
        stream: int,
        layer: int,
        queries: Tensor,
        output: Tensor,
        plan: int,
        batch: int,
        positions: int,
        counters: Tensor,
        drafted: Tensor | None,
    ) -> None:
        """Rows of the plan are resolved; those beyond the row's drafts are left alone."""
        rows = []
        for row, (lower, upper, table_row, query) in enumerate(
            _rows_of(plan, self.verify_plan_words(batch, positions))
        ):
            count = 1 + (max(0, min(int(drafted[row]), positions - 1)) if drafted is not None else 0)
            start = max(int(counters[table_row]), 0) - 1
            if lower <= start + 1 <= upper:  # otherwise the plan lies, and nothing reads the output
                rows.append((start, count, table_row, query))
        self._attend(layer, queries, output, rows)

    def _run(self, layer: int, queries: Tensor, output: Tensor, plan: int, plan_words: int) -> None:
        self._attend(layer, queries, output, _rows_of(plan, plan_words))

    def _attend(self, layer: int, queries: Tensor, output: Tensor, rows: Iterable[Sequence[int]]) -> None:
        config = self._config
        keys, values = self._cache.data[layer]
        for start, count, table_row, query in rows:
            own = slice(query, query + count)
            output[own] = paged_attention(
                queries[own].unflatten(1, (config.num_heads, config.head_dim)),
                keys,
                values,
                [start],
                [count],
                [self._tables[table_row].tolist()],
                self._layers[layer].window,
                self._cache.layer_scales(layer),
                self._layers[layer],
            )


def _rows_of(plan: int, plan_words: int) -> list[list[int]]:
    """Returns the rows of the plan at an address; ctypes.cast would leave a reference cycle."""
    words = np.frombuffer(ctypes.string_at(plan, 4 * plan_words), np.int32)
    rows: list[list[int]] = words[8 : 8 + 4 * words[0]].reshape(-1, 4).tolist()
    return rows


def _write_rows(
    starts: NDArray[np.int32],
    counts: NDArray[np.int32],
    table_rows: NDArray[np.int32],
    query_rows: NDArray[np.int32],
    plan: NDArray[np.int32],
) -> None:
    plan[0] = len(starts)
    plan[8 : 8 + 4 * len(starts)] = np.stack((starts, counts, table_rows, query_rows), axis=1).ravel()
