"""Runs attention in the canonical order in every kind of step, and compares bits with the twin and among kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner_svc.attention import cuda_decode, cuda_prefill
from runner_svc.attention.canonical_gpu.attention import CanonicalGpuAttention
from runner_svc.attention.softmax_arguments import sinks_of
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows, VerifyRows
from runner_svc.interface.attention_layer import AttentionLayer
from tests.support.attention_cases import AttentionBatch
from tests.support.attention_runs import stream_of, to_device, wait_for
from tests.support.canonical_arithmetic import Arithmetic
from tests.support.canonical_twin import TwinKind, attend


@contextmanager
def low_halves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes kernels store the halves of float32 outputs that rounding drops."""
    with monkeypatch.context() as patch:
        for module in (cuda_decode, cuda_prefill):
            load = module.load
            patch.setattr(module, "load", partial(_with_low_halves, load))
        yield


def _with_low_halves(load: Any, name: str, defines: dict[str, int | str]) -> Any:
    return load(name, {**defines, "LOW_HALVES": 1})


@dataclass(frozen=True, slots=True)
class Ran:
    """Bits of outputs, int16 [N, num_heads, head_dim], and the indexes of their queries among the batch's [N]."""

    bits: Tensor
    places: list[int]

    def differences(self, expected: Tensor) -> int:
        """Returns how many bit patterns differ from those of all of the batch's queries."""
        return int((self.bits != expected[self.places]).sum())


class CanonicalCase:
    """A batch whose rows end with `counts` queries."""

    def __init__(self, batch: AttentionBatch, max_batch: int = 64) -> None:
        self.batch, self.case = batch, batch.case
        self.layer = AttentionLayer(self.case.window, self.case.scale, self.case.soft_cap, batch.sinks)
        self.device = batch.queries.device
        self._max_batch = max_batch

    def attention(self) -> CanonicalGpuAttention:
        return CanonicalGpuAttention(
            self.batch.cache,
            self.batch.block_tables,
            self.case.num_heads,
            [self.layer],
            self._max_batch,
            self.case.dtype,
        )

    def rows_of(self, row: int) -> range:
        """Indexes of a row's queries among the batch's."""
        first = int(self.batch.query_rows[row])
        return range(first, first + self.case.counts[row])

    def expected(self, arithmetic: Arithmetic) -> Tensor:
        """Returns the twin's float32 outputs [T, num_heads, head_dim]."""
        cache, case, outputs = self.batch.cache, self.case, []
        sinks = None if self.layer.sinks is None else sinks_of(self.layer, case.num_heads, self.device)
        kind = TwinKind(case.scale or case.head_dim**-0.5, case.window, case.soft_cap, sinks)
        for row, (length, count) in enumerate(zip(case.lengths, case.counts, strict=True)):
            blocks = self.batch.block_tables[row, : -(-length // case.block_size)].long()
            keys, values = (
                half.view(torch.uint8)[blocks].view(half.dtype).flatten(0, 1)[:length] for half in cache.data[0]
            )
            own = self.batch.queries[list(self.rows_of(row))]
            positions = torch.arange(length - count, length, device=self.device)
            units = None if cache.scales is None else cache.scales[0].to(self.device)
            outputs.append(attend(arithmetic, own, positions, keys, values, kind, units))
        return torch.cat(outputs)

    def prefill(self, attention: CanonicalGpuAttention, chunks: Sequence[tuple[int, int, int]]) -> Ran:
        """Runs chunks (row, first of its queries, count) in one step."""
        batch = self.batch
        starts = batch.lengths - batch.counts
        rows = np.array([row for row, _, _ in chunks], np.int32)
        offsets = np.array([offset for _, offset, _ in chunks], np.int32)
        counts = np.array([count for _, _, count in chunks], np.int32)
        words = attention.prefill_plan_words(int(counts.sum()), len(chunks))
        plan = np.empty(words, np.int32)
        attention.plan_prefill(starts[rows] + offsets, counts, rows, batch.query_rows[rows] + offsets, plan)
        return self._run(
            lambda output, address: attention.run_prefill(
                stream_of(self.device), 0, batch.queries, output, address, words
            ),
            plan,
            self._of_chunks(chunks),
        )

    def decode(self, attention: CanonicalGpuAttention, queries: Sequence[tuple[int, int]]) -> Ran:
        """Runs (row, index of its query) as decode rows of one step."""
        batch, size = self.batch, len(queries)
        rows, lengths, places = self._places(queries)
        plan = np.zeros(attention.decode_plan_words(size), np.int32)
        attention.plan_decode(lengths, rows, plan, places, size)
        return self._run(
            lambda output, address: attention.run_decode(
                stream_of(self.device), 0, batch.queries, output, address, size
            ),
            plan,
            places.tolist(),
        )

    def mixed(
        self,
        attention: CanonicalGpuAttention,
        queries: Sequence[tuple[int, int]],
        chunks: Sequence[tuple[int, int, int]],
    ) -> Ran:
        """Runs decode rows and chunks in one step."""
        batch, size = self.batch, len(queries)
        rows, lengths, places = self._places(queries)
        of_chunk, offsets, counts = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
        prefill_words = attention.prefill_plan_words(int(counts.sum()), len(chunks))
        plan = np.zeros(attention.mixed_plan_words(size, prefill_words), np.int32)
        attention.plan_mixed(
            DecodeRows(lengths, rows, places),
            PrefillRows(
                (batch.lengths - batch.counts)[of_chunk] + offsets,
                counts,
                of_chunk,
                batch.query_rows[of_chunk] + offsets,
            ),
            plan,
            size,
            prefill_words,
        )
        return self._run(
            lambda output, address: attention.run_mixed(
                stream_of(self.device), 0, batch.queries, output, address, size, prefill_words
            ),
            plan,
            [*places.tolist(), *self._of_chunks(chunks)],
        )

    def verify(
        self, attention: CanonicalGpuAttention, chunks: Sequence[tuple[int, int, int]], positions: int, slack: int = 0
    ) -> Ran:
        """Runs chunks (row, first of its queries, count) of at most `positions` queries, each row once, as verify rows.

        `slack` is the distance of the host's bounds from the truth.
        """
        batch, size = self.batch, len(chunks)
        rows, knowns, _ = self._places([(row, offset) for row, offset, _ in chunks])
        counters = torch.full((batch.block_tables.shape[0],), 10**6, dtype=torch.int32)
        counters[torch.from_numpy(rows).long()] = torch.from_numpy(knowns)
        drafted = torch.tensor([count - 1 for _, _, count in chunks], dtype=torch.int32, device=self.device)
        counters = counters.to(self.device)
        heads = batch.queries.shape[1:]
        queries = torch.full((size * positions, *heads), float("nan"), dtype=batch.queries.dtype, device=self.device)
        own = [index * positions + i for index, (_, _, count) in enumerate(chunks) for i in range(count)]
        theirs = self._of_chunks(chunks)
        queries[own] = batch.queries[theirs]
        plan = np.zeros(attention.verify_plan_words(size, positions), np.int32)
        firsts = np.arange(size, dtype=np.int32) * positions
        attention.plan_verify(
            VerifyRows(np.maximum(knowns - slack, 0), knowns + slack, rows, firsts), plan, size, positions
        )
        output, device_plan = torch.full_like(queries, float("nan")), to_device(plan, self.device)
        attention.run_verify(
            stream_of(self.device), 0, queries, output, device_plan.data_ptr(), size, positions, counters, drafted
        )
        wait_for(self.device)
        return Ran(output.view(torch.int16)[own], theirs)

    def _places(self, queries: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns rows, lengths and indexes of queries (row, index of its query)."""
        batch = self.batch
        rows = np.array([row for row, _ in queries], np.int32)
        offsets = np.array([offset for _, offset in queries], np.int32)
        return rows, (batch.lengths - batch.counts)[rows] + offsets + 1, batch.query_rows[rows] + offsets

    def _of_chunks(self, chunks: Sequence[tuple[int, int, int]]) -> list[int]:
        return [self.rows_of(row)[offset + i] for row, offset, count in chunks for i in range(count)]

    def _run(self, launch: Any, plan: np.ndarray, places: list[int]) -> Ran:
        output, device_plan = torch.full_like(self.batch.queries, float("nan")), to_device(plan, self.device)
        launch(output, device_plan.data_ptr())
        wait_for(self.device)
        return Ran(output.view(torch.int16)[places], places)


def halves(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 outputs as bits of their bfloat16 and as the low halves of their bits, int16 each."""
    return outputs.bfloat16().view(torch.int16), outputs.view(torch.int32).to(torch.int16)
