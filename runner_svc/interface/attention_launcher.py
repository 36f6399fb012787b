"""What launches the attention of a step: the interface, implemented by `runner_svc.attention.cuda`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one position each, int32 [N]: their lengths with it, rows of the block tables, rows of the queries."""

    lengths: NDArray[np.int32]
    table_rows: NDArray[np.int32]
    query_rows: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows of `counts` positions from `starts`, int32 [R]; rows of the block tables, and of their first queries."""

    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    table_rows: NDArray[np.int32]
    query_rows: NDArray[np.int32]


class AttentionLauncher(Protocol):
    """As `runner_svc.attention.cuda.CudaAttention`."""

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
        self, decode: DecodeRows, prefill: PrefillRows, plan: NDArray[np.int32], batch: int, prefill_words: int
    ) -> None: ...

    def run_mixed(
        self, stream: int, layer: int, queries: Tensor, output: Tensor, plan: int, batch: int, prefill_words: int
    ) -> None: ...
