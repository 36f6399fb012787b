"""What launches the kernels of a step beside those of the decoder: interfaces, implemented by `runner_svc.cuda`.

The backend knows only these, so that tests can drive it where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.attention.mixed_plan import DecodeRows, PrefillRows
from runner_svc.kv_cache import KVCache
from runner_svc.model.cuda_decoder import DecoderLaunchers
from runner_svc.model.skinny_decoder import SkinnyLaunchers


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


class GatherLauncher(Protocol):
    """As `runner_svc.cuda.gather.GatherInputs`."""

    def __call__(
        self,
        stream: int,
        slots: Tensor,
        starts: Tensor,
        offsets: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
    ) -> None: ...


class ScatterLauncher(Protocol):
    """As `runner_svc.cuda.scatter.ScatterSegments`."""

    def __call__(self, stream: int, words: Tensor, changes: Tensor, num_segments: int) -> None: ...


class CopyLauncher(Protocol):
    """As `runner_svc.cuda.copy.CopyWords`."""

    def __call__(self, stream: int, source: Tensor, target: Tensor, num_words: int) -> None: ...


class SamplingLauncher(Protocol):
    """As `runner_svc.cuda.sampling.CudaSampler`."""

    def __call__(
        self,
        stream: int,
        logits: Tensor,
        records: Tensor,
        extra_ids: Tensor,
        extra_values: Tensor,
        tokens: Tensor,
        finite: Tensor,
        *,
        adjusted: bool,
        masks: Tensor | None = None,
    ) -> None: ...


class Launchers(Protocol):
    """Makes the launchers of one model; as `runner_svc.cuda.launchers.CudaLaunchers`."""

    def decoder(self, fp8_cache: bool) -> DecoderLaunchers: ...

    def skinny(self, matrices: Sequence[Tensor]) -> list[SkinnyLaunchers]: ...

    def attention(self, cache: KVCache, tables: Tensor, max_batch: int) -> AttentionLauncher: ...

    def gather(self, tokens: Tensor, tables: Tensor, block_size: int) -> GatherLauncher: ...

    def copy(self) -> CopyLauncher: ...

    def scatter(self) -> ScatterLauncher: ...

    def sampling(self, tokens: Tensor) -> SamplingLauncher: ...
