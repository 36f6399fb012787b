"""The GPU backend of a runner whose drafts EAGLE's layer draws: see `eagle_draft`."""

from __future__ import annotations

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
from runner_svc.gpu.drafts.draft_draws import DraftDraws
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafted_steps import DraftedSteps
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.gpu.drafts.eagle_draft import EagleDraft, longest_of
from runner_svc.gpu.step_buffers import PackedRows, PackedStep, PlacedRecords
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.draft_launchers import DraftRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.step import StepBatch


def _proposed_before(stream: int, rows: DraftRows, proposals: Tensor) -> None:
    """Leaves the proposals as they are: they were made before the pass."""


class EagleSteps(DraftedSteps):
    """Passes that verify what EAGLE's layer has drafted before them."""

    def __init__(self, weights: EagleWeights, draws: DraftDraws, *arguments: Any, **sizes: Any) -> None:
        """Further arguments as those of `DraftedSteps`."""
        super().__init__(*arguments, **sizes)
        self._propose = _proposed_before
        decoder, cache = self._decoder, self.cache
        assert isinstance(decoder, CudaDecoder), "drafts are refused for others"
        self._own, self._taps = decoder, weights.taps
        if not decoder.taps:
            most, like = sizes["max_step_tokens"], decoder.workspace.residual
            inside = [tap for tap in self._taps if tap < decoder.config.num_layers]
            decoder.taps = {tap: like.new_zeros(most, like.shape[1]) for tap in inside}
        blocks = {"num_blocks": cache.num_blocks, "block_size": cache.block_size}
        self.eagle = EagleDraft(weights, decoder, draws, self._slots, self.logits, **blocks)

    def follow(self, stream: int, hidden: Hidden | None, num_rows: int, num_tokens: int) -> None:
        """Keeps the states of the last pass; `hidden`: what a mixed pass has left."""
        layout = self.layout
        slots, offsets = self._section(layout.slots, num_rows), self._section(layout.offsets, num_rows + 1)
        states = self._states(stream, hidden, num_tokens)
        self.eagle.follow(slots, offsets, self._inputs[:, :num_tokens], states)

    def _states(self, stream: int, hidden: Hidden | None, num_tokens: int) -> Tensor:
        # The passes that are whole leave the sum of all layers.
        whole = Hidden(self._own.workspace.residual[:num_tokens], None)
        left = whole if hidden is None else hidden.slice(0, num_tokens)
        normed = self._own.normed(stream, left)
        if not self._taps:
            return normed
        kept = self._own.taps
        return torch.cat([kept[tap][:num_tokens] if tap in kept else left.residual for tap in self._taps], dim=1)

    def propose(self, stream: int, num_rows: int, drafts: int, longest: int) -> None:
        """Drafts for the verifying pass of `num_rows` that is launched next."""
        proposals = self._proposals[: num_rows * drafts].view(num_rows, drafts)
        self.eagle.propose(stream, self.rows_on_device(num_rows), proposals, longest)


class EagleDraftingCudaBackend(DraftingCudaBackend):
    """Implements `runner_svc.interface.backend.OverlappingBackend`, with rows that EAGLE's layer drafts."""

    _steps: EagleSteps

    def __init__(self, *arguments: Any, weights: EagleWeights, drafts: DraftOptions, **options: Any) -> None:
        """Further arguments as those of `DraftingCudaBackend`."""
        self._weights = weights
        super().__init__(*arguments, drafts=drafts, **options)

    @torch.inference_mode()
    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks, the layer's too; all sources are read before any target is written."""
        super().copy_blocks(sources, targets)
        with self._device.stream():
            self._steps.eagle.copy_blocks(self._index(sources), self._index(targets))

    def _kept_by_block(self) -> list[Tensor]:
        return [*super()._kept_by_block(), *self._steps.eagle.kept_by_block()]

    def _pack(self, step: PackedStep, batch: StepBatch) -> tuple[PackedRows, Forward]:
        rows, forward = super()._pack(step, batch)
        num_rows, num_tokens = len(rows.slots), int(rows.offsets[-1])

        def followed(stream: int) -> Hidden | None:
            hidden = forward(stream)
            self._steps.follow(stream, hidden, num_rows, num_tokens)
            return hidden

        return rows, followed

    def _prepare_drafts(self, stream: int, batch: StepBatch, rows: PackedRows, records: PlacedRecords) -> None:
        if rows.unknown and rows.stride > 1:
            self._steps.eagle.draws.take(records, self._steps.packed)
            longest = longest_of(batch.highest, batch.starts)
            self._steps.propose(stream, len(rows.slots), rows.stride - 1, longest)

    # ------------------------------------------------------------------ start-up

    @property
    def _block_bytes(self) -> int:
        own = EagleDraft.numbers_per_position(self._weights) * self._decoder.dtype.itemsize
        return super()._block_bytes + self.block_size * own

    def _make_steps(self, cache: KVCache) -> CudaSteps:
        self._weights = self._weights.to(self._device.device, self._decoder.dtype)
        return self._drafted(partial(EagleSteps, self._weights, self._make_draft_draws()), cache)

    def _run_largest(self, steps: CudaSteps) -> None:
        super()._run_largest(steps)
        assert isinstance(steps, EagleSteps)
        stream = self._device.current_stream()
        steps.packed.zero_()
        steps.follow(stream, None, self.num_slots, self.max_step_tokens)
        steps.propose(stream, self.num_slots, self._drafts.widest - 1, self._sizes.context_length)
