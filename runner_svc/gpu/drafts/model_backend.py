"""The GPU backend of a runner whose drafts a small model draws.

The draft model's passes are launches of the verifying pass (`draft_model`), so in its graph. What a row missed is
computed before, by a pass of the draft model alone, in steps in which the row drafts next (`draft_progress`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.gpu.backend import MAX_IN_FLIGHT, Forward
from runner_svc.gpu.drafts.draft_model import CATCH_UP, FIRST, DraftModel, DraftParts
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.draft_progress import DraftProgress
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.gpu.drafts.planned_steps import PlannedSteps
from runner_svc.gpu.step_buffers import PackedRows, PackedStep, PlacedRecords
from runner_svc.gpu.steps import CudaSteps, MixedStep
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.step import StepBatch


class ModelDraftingCudaBackend(DraftingCudaBackend):
    """Implements `runner_svc.interface.backend.OverlappingBackend`, with rows that a small model drafts."""

    _steps: PlannedSteps[DraftModel]

    def __init__(self, *arguments: Any, parts: DraftParts, drafts: DraftOptions, **options: Any) -> None:
        """`drafts`: its name is not used. Further arguments as those of `CudaBackend`."""
        self._parts = parts
        self._draft_decoder: CudaDecoder | None = None
        self._catching_up: tuple[PackedStep, MixedStep, Tensor] | None = None
        super().__init__(*arguments, drafts=replace(drafts, name=parts.name), **options)
        draft, sizes = self._steps.draft, self._sizes
        self._progress = DraftProgress(
            self.num_slots,
            sizes.max_table,
            self.num_blocks,
            self.block_size,
            draft.context_length,
            by_prompt=self._own_decoder.config.prefix_positions is not None,
        )
        words = draft.steps.layout.words
        self._buffers = [self._device.pinned(words) for _ in range(MAX_IN_FLIGHT)]

    def change_slots(self, changes: SlotChanges) -> None:
        """As `CudaBackend.change_slots`."""
        super().change_slots(changes)
        self._progress.change(changes)

    @torch.inference_mode()
    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks of both models; all sources are read before any target is written."""
        super().copy_blocks(sources, targets)
        with self._device.stream():
            self._steps.draft.cache.copy_blocks(self._index(sources), self._index(targets))
        self._progress.counters.copy_blocks(sources, targets)

    def forget_drafts(self, blocks: NDArray[np.int32]) -> None:
        """Forgets the draft model's KV of blocks that are loaded from the host pool, which has only the model's."""
        self._progress.counters.forget_blocks(blocks)

    def _pack(self, step: PackedStep, batch: StepBatch) -> tuple[PackedRows, Forward]:
        self._catching_up = None
        if len(batch.drafts) and batch.drafts.any():
            batch, missed = self._progress.catch_up(batch, CATCH_UP)
            self._catching_up = self._packed_catch_up(missed) if missed is not None else None
        rows, forward = super()._pack(step, batch)
        if rows.unknown and rows.stride > 1:
            self._progress.drafted(batch)
        else:
            self._progress.skipped(batch.slots[batch.sample])
        return rows, forward

    def _packed_catch_up(self, missed: StepBatch) -> tuple[PackedStep, MixedStep, Tensor]:
        buffer = self._buffers.pop(0)  # the step that used it has been waited for
        self._buffers.append(buffer)
        draft = self._steps.draft
        step = PackedStep(draft.steps.layout, buffer.numpy())
        return step, draft.catch_up(step, missed), buffer

    def _prepare_drafts(self, stream: int, batch: StepBatch, rows: PackedRows, records: PlacedRecords) -> None:
        if rows.stride > 1:
            self._steps.draft.draws.take(records, self._steps.packed)
        if self._catching_up is not None:
            (step, mixed, buffer), steps = self._catching_up, self._steps.draft.steps
            self._copy(stream, buffer, steps.packed, step.used)
            steps.run_mixed(stream, mixed)

    # ------------------------------------------------------------------ start-up

    @property
    def _own_decoder(self) -> CudaDecoder:
        """The draft model's."""
        if self._draft_decoder is None:
            self._draft_decoder = self._parts.make_decoder(max(CATCH_UP, FIRST * self.num_slots))
        return self._draft_decoder

    @property
    def _block_bytes(self) -> int:
        own = self._own_decoder
        return super()._block_bytes + KVCache.block_bytes(own.config, self.block_size, own.dtype)

    def _make_steps(self, cache: KVCache) -> CudaSteps:
        assert isinstance(self._decoder, CudaDecoder), "drafts are refused for others"
        draft = DraftModel(
            self._own_decoder,
            self._parts.launchers,
            self._make_draft_draws(),
            self._slots,
            num_blocks=cache.num_blocks,
            block_size=self.block_size,
            num_slots=self.num_slots,
            vocab_size=self._decoder.config.vocab_size,
        )
        return self._drafted(partial(PlannedSteps, draft), cache)
