"""Interfaces of the launchers of a step's kernels outside the decoder, implemented by `runner_svc.cuda`.

The backend uses only these interfaces, so that tests can run it without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from runner_svc.interface.attention_launcher import AttentionLauncher
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.draft_launchers import DraftLaunchers
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.layer_launchers import DecoderLaunchers
from runner_svc.interface.products.skinny_launchers import SkinnyLaunchers
from runner_svc.tiers.block_copies import BlockCopies
from runner_svc.weights.matrix import Matrix


class GatherLauncher(Protocol):
    """Implemented by `runner_svc.cuda.gather.GatherInputs`."""

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
    """Implemented by `runner_svc.cuda.scatter.ScatterSegments`."""

    def __call__(self, stream: int, words: Tensor, changes: Tensor, num_segments: int) -> None: ...


class CopyLauncher(Protocol):
    """Implemented by `runner_svc.cuda.copy.CopyWords`."""

    def __call__(self, stream: int, source: Tensor, target: Tensor, num_words: int) -> None: ...


class SamplingLauncher(Protocol):
    """Implemented by `runner_svc.cuda.sampling.CudaSampler`."""

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


class LogprobsLauncher(Protocol):
    """Implemented by `runner_svc.sampling.device_logprobs.torch_logprobs`."""

    def __call__(self, stream: int, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Computes log-softmax of `logits`, float32 [n, V], at `tokens` int64 [n].

        Returns that [n], and the `top` largest of each row: their ids and values, [n, top] each.
        """


class Launchers(Protocol):
    """Makes the launchers of one model; implemented by `runner_svc.gpu.launchers.CudaLaunchers`."""

    def decoder(self, fp8_cache: bool) -> DecoderLaunchers: ...

    def skinny(self, matrices: Sequence[Matrix]) -> list[SkinnyLaunchers]: ...

    def attention(
        self, cache: KVCache, tables: Tensor, max_batch: int, layers: Sequence[AttentionLayer]
    ) -> AttentionLauncher: ...

    def gather(self, tokens: Tensor, tables: Tensor, block_size: int) -> GatherLauncher: ...

    def copy(self) -> CopyLauncher: ...

    def scatter(self) -> ScatterLauncher: ...

    def blocks(self) -> BlockCopies: ...

    def sampling(self, tokens: Tensor, *, writes: bool = True) -> SamplingLauncher: ...

    def drafts(self, tokens: Tensor, counters: Tensor, tables: Tensor, block_size: int) -> DraftLaunchers: ...

    def logprobs(self) -> LogprobsLauncher: ...
