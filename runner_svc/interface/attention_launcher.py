"""The interface of a launcher of a step's attention, implemented by `runner_svc.attention.cuda`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one position each, int32 [N]: lengths including it, rows in the block tables, rows in the queries.

    `firsts` are the first positions that rows see; None: those of each layer's window.
    """

    lengths: NDArray[np.int32]
    table_rows: NDArray[np.int32]
    query_rows: NDArray[np.int32]
    firsts: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """Rows whose first positions only the device's counters tell, int32 [N].

    Bounds of each row's counter when the step executes, rows in the block tables and the counters, first rows in the
    queries.
    """

    lowers: NDArray[np.int32]
    uppers: NDArray[np.int32]
    table_rows: NDArray[np.int32]
    query_rows: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of `counts` positions from `starts`, int32 [R]; rows in the block tables, first rows in the queries."""

    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    table_rows: NDArray[np.int32]
    query_rows: NDArray[np.int32]


class AttentionLauncher(Protocol):
    """Implemented by `runner_svc.attention.cuda.CudaAttention`."""

    def decode_plan_words(self, batch: int) -> int: ...

    def plan_decode(
        self,
        lengths: NDArray[np.int32],
        table_rows: NDArray[np.int32],
        plan: NDArray[np.int32],
        query_rows: NDArray[np.int32] | None = None,
        batch: int | None = None,
    ) -> None: ...

    def run_decode(self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, batch: int) -> None: ...

    def prefill_plan_words(self, num_tokens: int, num_rows: int) -> int: ...

    def mixed_plan_words(self, batch: int, prefill_words: int) -> int: ...

    def plan_mixed(
        self,
        decode: DecodeRows | VerifyRows,
        prefill: PrefillRows,
        plan: NDArray[np.int32],
        batch: int,
        prefill_words: int,
    ) -> None: ...

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
    ) -> None: ...

    def verify_plan_words(self, batch: int, positions: int) -> int: ...

    def plan_verify(self, rows: VerifyRows, plan: NDArray[np.int32], batch: int, positions: int) -> None: ...

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
    ) -> None: ...
