"""The GPU backend of a runner that drafts: it also verifies rows, whose number of tokens only the device knows.

A verifying step drafts, places the drafts in the token buffer and computes the last known token and the drafts of each
row (`drafted_steps`). After it, the sampler draws at each of these positions into an array of its own. Then one kernel
keeps the draws up to the first that differs from its draft, writes them into the token buffer, and sets the slot's
counter, from which later steps take positions: the host need not know them to launch the next step.

In all other steps that kernel keeps each row's only draw, so that counters are right at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.decoder.fusions import Fusions
from runner_svc.gpu.backend import TAIL_WORDS, CudaBackend, Forward
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.drafts.draft_draws import DraftDraws
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafted_steps import DraftedSteps, VerifyShape
from runner_svc.gpu.drafts.pending_step import PendingDraftedStep
from runner_svc.gpu.drafts.verify_graphs import VerifyGraphs
from runner_svc.gpu.graphs import StepGraphs
from runner_svc.gpu.masked_rows import CudaMaskedRows
from runner_svc.gpu.pending_step import HostBuffers, PendingCudaStep
from runner_svc.gpu.profiling_batch import TIMED_CONTEXT, batch_of
from runner_svc.gpu.step_buffers import PackedRows, PackedStep, PlacedRecords, aligned
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.draft_launchers import AcceptLauncher
from runner_svc.interface.kv_cache import FP8, KVCache
from runner_svc.interface.launchers import SamplingLauncher
from runner_svc.interface.progress import Progress
from runner_svc.interface.step import StepBatch
from runner_svc.sampling.device_logprobs import PendingLogprobs, launch_row_logprobs
from runner_svc.sampling.sample_records import RECORD_WORDS, SampleRows
from runner_svc.timings.start_timings import StartTimings


class AcceptingSampler:
    """A `SamplingLauncher` of one draw a row that is accepted at once."""

    def __init__(self, sampling: SamplingLauncher, accept: AcceptLauncher) -> None:
        """`sampling` only draws."""
        self._sampling, self._accept = sampling, accept

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
    ) -> None:
        """Draws and accepts; arguments as those of the sampler."""
        drawn = (logits, records, extra_ids, extra_values, tokens, finite)
        self._sampling(stream, *drawn, adjusted=adjusted, masks=masks)
        self._accept(stream, records, tokens, finite, torch.empty_like(tokens), 1)


class DraftingCudaBackend(CudaBackend):
    """Implements `runner_svc.interface.backend.OverlappingBackend`, with rows that draft."""

    _steps: DraftedSteps

    def __init__(self, *arguments: Any, drafts: DraftOptions, **options: Any) -> None:
        """Arguments as those of `CudaBackend`; the decoder must be Roster's own."""
        self._drafts = drafts
        self.max_drafts = drafts.max_drafts
        self.drafter_name = drafts.name
        super().__init__(*arguments, **options)
        device = self._device.device
        most = self._steps.most_sampled
        self._draw_finite = torch.zeros(most, dtype=torch.uint8, device=device)
        self._expanded = torch.zeros(most * RECORD_WORDS, dtype=torch.int32, device=device)
        self._masked_sampling = AcceptingSampler(self._sampling, self._steps.launchers.accept)

    @property
    def max_sampled(self) -> int:
        """Most positions of a plan that are sampled without cutting drafts."""
        return self._steps.most_sampled

    @property
    def verify_graphs(self) -> VerifyGraphs:
        """The CUDA graphs of verifying steps."""
        return self._verify

    def _pack(self, step: PackedStep, batch: StepBatch) -> tuple[PackedRows, Forward]:
        drafted = batch.starts < 0
        if not drafted.any() or not (batch.sample & (drafted | (batch.counts == 1))).all():
            return super()._pack(step, batch)
        most = int(batch.drafts.max()) if len(batch.drafts) else 0
        shape = self._verify.shape(len(batch.slots), most)
        return self._steps.pack_verify(step, batch, shape), partial(self._run_verify, shape)

    def _run_verify(self, shape: VerifyShape, stream: int) -> None:
        self._verify.launch(shape)

    def _pack_records(self, batch: StepBatch, rows: PackedRows) -> SampleRows:
        """The position of a row that only the device knows is -1; `reserved` marks rows that are drawn again later."""
        packed = super()._pack_records(batch, rows)
        if not rows.unknown and not len(batch.awaits):
            return packed
        records = packed.records.copy()
        records["position"][batch.starts[rows.sample_rows] < 0] = -1
        if len(batch.awaits):
            records["reserved"] = np.isin(rows.sample_rows, batch.awaits)
        return replace(packed, records=records)

    def _draw(
        self, stream: int, batch: StepBatch, rows: PackedRows, records: PlacedRecords, buffers: HostBuffers
    ) -> list[PendingLogprobs]:
        num_sampled, stride, steps = len(rows.sample_rows), rows.stride, self._steps
        if not num_sampled:
            return []
        draws, packed = num_sampled * stride, steps.packed
        logits, tokens, finite = steps.logits[:draws], self._result[:draws], self._draw_finite[:draws]
        own = records.records.tensor(packed)
        if rows.unknown:
            sampled = steps.sampled(num_sampled)
            steps.launchers.expand(stream, own, sampled, steps.rows_on_device(len(rows.slots)), self._expanded, stride)
            own = self._expanded
        ids, values = records.extra_ids.tensor(packed), records.extra_values.tensor(packed)
        self._sampling(stream, logits, own, ids, values, tokens, finite, adjusted=records.adjusted)
        outcomes = self._result[aligned(steps.most_sampled) :][:num_sampled]
        steps.launchers.accept(stream, own, tokens, finite, outcomes, stride)
        self._accepted(own, outcomes, stride)
        self._copy(stream, self._result, buffers.result, len(self._result))
        asking, launch = records.asking, self._logprobs
        return launch_row_logprobs(launch, stream, logits, tokens, batch, rows.sample_rows, asking, stride)

    def _accepted(self, records: Tensor, outcomes: Tensor, stride: int) -> None:
        """Launches what a drafter needs of a step's accepted draws; `records` are those of all draws."""

    def _keep_masked_rows(self, batch: StepBatch, rows: PackedRows) -> CudaMaskedRows:
        waiting = self._index(np.searchsorted(rows.sample_rows, batch.awaits) * rows.stride)
        logits = self._steps.logits[waiting]
        return CudaMaskedRows(batch, logits, self._masked_sampling, self._logprobs, self._device, self.num_slots)

    def _pending(self, rows: PackedRows, batch: StepBatch) -> Callable[..., PendingCudaStep]:
        return partial(PendingDraftedStep, stride=rows.stride, drafts=len(batch.drafts) > 0)

    # ------------------------------------------------------------------ start-up

    def _make_slots(self) -> DeviceSlots:
        sizes = self._sizes
        return DeviceSlots(sizes.num_slots, sizes.context_length, sizes.max_table, self._device.device, counted=True)

    def _make_sampling(self) -> SamplingLauncher:
        return self._launchers.sampling(self._slots.tokens, writes=False)

    def _make_draft_draws(self) -> DraftDraws:
        """Returns what draws drafts from logits of the target's ids."""
        return DraftDraws(self._launchers.sampling(self._slots.tokens), self.num_slots, self._device.device)

    @property
    def _most_draws(self) -> int:
        return self._drafts.most_sampled(self.num_slots, self.max_step_tokens)

    def _make_steps(self, cache: KVCache) -> CudaSteps:
        return self._drafted(DraftedSteps, cache)

    def _drafted(self, make: Callable[..., DraftedSteps], cache: KVCache) -> DraftedSteps:
        """Returns the steps that `make` makes of the arguments of `DraftedSteps`."""
        assert isinstance(self._decoder, CudaDecoder), "drafts are refused for others"
        return make(
            self._decoder,
            cache,
            self._slots,
            self._launchers,
            self._drafts,
            num_slots=self.num_slots,
            max_step_tokens=self.max_step_tokens,
            tail_words=TAIL_WORDS,
        )

    def _captured(
        self, progress: Progress, timings: StartTimings, *, measures: bool = True
    ) -> tuple[StepGraphs, StepGraphs]:
        decode, mixed = super()._captured(progress, timings, measures=measures)
        self._verify = VerifyGraphs(self._steps, self._device, decode)
        self._verify.time(partial(self._prepare_timed, self._steps), progress, timings)
        self._slots.num_blocks[:] = 0
        self._slots.counters.fill_(1)
        self._verify.capture(partial(self._prepare, self._steps), progress)
        self._slots.words.zero_()
        self._steps.packed.zero_()
        return decode, mixed

    def _run_largest(self, steps: CudaSteps) -> None:
        super()._run_largest(steps)
        assert isinstance(steps, DraftedSteps)
        stride = self._drafts.widest
        shape = VerifyShape(max(1, min(self.num_slots, steps.most_sampled // stride)), stride)
        self._prepare(steps, shape)
        variants = steps.verify_variants(self._device.current_stream, shape)
        plain = [variant for variant in variants if variant.name == Fusions().name]  # takes the most memory
        (plain or variants)[0].launch()

    def _prepare_timed(self, steps: DraftedSteps, shape: VerifyShape) -> None:
        """Sets the input of a verifying step of rows with random tokens, keys, values and drafts.

        Rows that are equal would take less power, and other variants would be the fastest.
        """
        slots, cache = self._slots, steps.cache
        known = max(1, min(TIMED_CONTEXT, self._sizes.context_length - shape.stride))
        width = -(-(known + shape.stride) // cache.block_size)
        slots.spread(known + shape.stride, cache)
        slots.num_blocks[:] = width
        slots.tokens.random_(steps.logits.shape[1])
        slots.counters.fill_(known)
        for layer in cache.data[:, :, : 1 + width * self.num_slots]:
            _fill_random(layer)
        steps.give()
        self._prepare(steps, shape, known - 1)

    def _prepare(self, steps: DraftedSteps, shape: VerifyShape, start: int = 0) -> None:
        """Sets the input of a verifying step with room for drafts, at positions from `start` on."""
        step = PackedStep(steps.layout, np.zeros(steps.layout.words, np.int32))
        batch = batch_of(np.full(shape.rows, -1, np.int32), np.full(shape.rows, shape.stride, np.int32))
        batch.lowest = batch.highest = np.full(shape.rows, start, np.int32)
        steps.pack_verify(step, batch, shape)
        steps.packed.copy_(torch.from_numpy(step.words))


def _fill_random(cached: Tensor) -> None:
    """Fills keys and values with finite random numbers."""
    if cached.dtype is FP8:
        cached.view(torch.uint8).random_(0x40)
    else:
        cached.normal_()
