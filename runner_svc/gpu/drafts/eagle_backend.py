"""The GPU backend of a runner whose drafts EAGLE's layer draws: see `eagle_draft`.

The layer's passes are launches of the pass that verifies, and what it keeps of a pass are launches behind it: both are
in its graph. Only mixed passes, whose states vary in number, are followed by launches of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.decoder.hidden import Hidden
from runner_svc.drafting.eagle.checkpoint import EagleWeights
from runner_svc.gpu.backend import Forward
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafted_steps import VerifyShape
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.gpu.drafts.eagle_draft import EagleDraft
from runner_svc.gpu.drafts.planned_steps import PlannedSteps
from runner_svc.gpu.graphs import Variant
from runner_svc.gpu.step_buffers import PackedRows, PackedStep, PlacedRecords
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import Launchers
from runner_svc.interface.step import StepBatch
from runner_svc.model.config import ModelConfig


class EagleSteps(PlannedSteps[EagleDraft]):
    """Passes that keep what EAGLE's layer reads, and verify what it has drafted."""

    def __init__(self, taps: tuple[int, ...], draft: EagleDraft, *arguments: Any, **sizes: Any) -> None:
        """`taps`: those of the layer's weights. Further arguments as those of `DraftedSteps`."""
        super().__init__(draft, *arguments, **sizes)
        decoder = self._decoder
        assert isinstance(decoder, CudaDecoder), "drafts are refused for others"
        draft.logits = self.logits  # the pass that verifies fills it after it has drafted
        self._own, self._taps = decoder, taps
        if not decoder.taps:
            most, like = sizes["max_step_tokens"], decoder.workspace.residual
            inside = [tap for tap in taps if tap < decoder.config.num_layers]
            decoder.taps = {tap: like.new_zeros(most, like.shape[1]) for tap in inside}

    def decode_variants(self, stream: Callable[[], int], bucket: int) -> list[Variant]:
        """As `CudaSteps.decode_variants`; each also keeps its states."""
        return self._followed(stream, super().decode_variants(stream, bucket), bucket, bucket)

    def verify_variants(self, stream: Callable[[], int], shape: VerifyShape) -> list[Variant]:
        """As `DraftedSteps.verify_variants`; each also keeps its states."""
        return self._followed(stream, super().verify_variants(stream, shape), shape.rows, shape.num_tokens)

    def follow(self, stream: int, hidden: Hidden | None, num_rows: int, num_tokens: int) -> None:
        """Keeps the states of the last pass; `hidden`: what a mixed pass has left."""
        layout = self.layout
        slots, offsets = self._section(layout.slots, num_rows), self._section(layout.offsets, num_rows + 1)
        states = self._states(stream, hidden, num_tokens)
        self.draft.follow(slots, offsets, self._inputs[:, :num_tokens], states)

    def _followed(
        self, stream: Callable[[], int], variants: Sequence[Variant], num_rows: int, num_tokens: int
    ) -> list[Variant]:
        def launch(variant: Variant) -> None:
            variant.launch()
            self.follow(stream(), None, num_rows, num_tokens)

        return [Variant(variant.name, partial(launch, variant)) for variant in variants]

    def _states(self, stream: int, hidden: Hidden | None, num_tokens: int) -> Tensor:
        # The passes that are whole leave the sum of all layers.
        whole = Hidden(self._own.workspace.residual[:num_tokens], None)
        left = whole if hidden is None else hidden.slice(0, num_tokens)
        normed = self._own.normed(stream, left)
        if not self._taps:
            return normed
        kept = self._own.taps
        return torch.cat([kept[tap][:num_tokens] if tap in kept else left.residual for tap in self._taps], dim=1)


class EagleDraftingCudaBackend(DraftingCudaBackend):
    """Implements `runner_svc.interface.backend.OverlappingBackend`, with rows that EAGLE's layer drafts."""

    _steps: EagleSteps

    def __init__(
        self,
        *arguments: Any,
        weights: EagleWeights,
        make_launchers: Callable[[ModelConfig, torch.dtype], Launchers],
        drafts: DraftOptions,
        **options: Any,
    ) -> None:
        """`make_launchers`: of the layer's sizes. Further arguments as those of `DraftingCudaBackend`."""
        self._weights, self._make_launchers = weights, make_launchers
        super().__init__(*arguments, drafts=drafts, **options)

    @torch.inference_mode()
    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks, the layer's too; all sources are read before any target is written."""
        super().copy_blocks(sources, targets)
        with self._device.stream():
            self._steps.draft.copy_blocks(self._index(sources), self._index(targets))

    def _kept_by_block(self) -> list[Tensor]:
        return [*super()._kept_by_block(), *self._steps.draft.kept_by_block()]

    def _pack(self, step: PackedStep, batch: StepBatch) -> tuple[PackedRows, Forward]:
        rows, forward = super()._pack(step, batch)
        num_rows, num_tokens = len(rows.slots), int(rows.offsets[-1])

        def followed(stream: int) -> Hidden | None:
            hidden = forward(stream)
            if hidden is not None:  # others keep their states themselves
                self._steps.follow(stream, hidden, num_rows, num_tokens)
            return hidden

        return rows, followed

    def _prepare_drafts(self, stream: int, batch: StepBatch, rows: PackedRows, records: PlacedRecords) -> None:
        if rows.unknown and rows.stride > 1:
            self._steps.draft.draws.take(records, self._steps.packed)

    # ------------------------------------------------------------------ start-up

    @property
    def _block_bytes(self) -> int:
        own = EagleDraft.numbers_per_position(self._weights) * self._decoder.dtype.itemsize
        return super()._block_bytes + self.block_size * own

    def _make_steps(self, cache: KVCache) -> CudaSteps:
        decoder, device = self._decoder, self._device.device
        assert isinstance(decoder, CudaDecoder), "drafts are refused for others"
        self._weights = self._weights.to(device, decoder.dtype)
        draft = EagleDraft(
            self._weights,
            decoder,
            self._make_launchers(self._weights.config, decoder.dtype),
            self._make_draft_draws(),
            self._slots,
            num_blocks=cache.num_blocks,
            block_size=self.block_size,
            num_slots=self.num_slots,
        )
        return self._drafted(partial(EagleSteps, self._weights.taps, draft), cache)

    def _run_largest(self, steps: CudaSteps) -> None:
        super()._run_largest(steps)
        assert isinstance(steps, EagleSteps)
        steps.packed.zero_()
        steps.follow(self._device.current_stream(), None, self.num_slots, self.max_step_tokens)
