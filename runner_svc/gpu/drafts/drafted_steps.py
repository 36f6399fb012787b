"""The passes of a backend that drafts: those of `CudaSteps`, and passes that verify.

A verifying pass has the last known token of each row and its drafts, `stride` places a row, absent ones included. What
drafts, the placing of drafts, and the gather are its first launches, so that a captured pass needs nothing of the host
but its packed rows. In a mixed step no row drafts, but rows whose first position only the device knows may decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.decoder.cuda_decoder import CudaDecoder, DeviceInputs, StepAttention
from runner_svc.decoder.step_rotations import StepRows
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.graphs import Variant
from runner_svc.gpu.step_buffers import PackedRows, PackedStep
from runner_svc.gpu.steps import CudaSteps, MixedShape, MixedStep, WholePass
from runner_svc.interface.attention_launcher import PrefillRows, VerifyRows
from runner_svc.interface.draft_launchers import DraftRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.launchers import Launchers
from runner_svc.interface.step import StepBatch


@dataclass(frozen=True, slots=True)
class VerifyShape:
    """Parameters of a verifying pass's launches."""

    rows: int  # padding included
    stride: int

    @property
    def num_tokens(self) -> int:
        """Places of the pass."""
        return self.rows * self.stride


class DraftedSteps(CudaSteps):
    """Packs and launches forward passes of a backend that drafts; `logits` has a row for each sampled position."""

    def __init__(
        self,
        decoder: CudaDecoder,
        cache: KVCache,
        slots: DeviceSlots,
        launchers: Launchers,
        options: DraftOptions,
        *,
        num_slots: int,
        max_step_tokens: int,
        tail_words: int,
    ) -> None:
        self.most_sampled = options.most_sampled(num_slots, max_step_tokens)
        self.strides = [1, *options.strides]
        """Places a row of verifying passes, ascending."""
        super().__init__(
            decoder,
            cache,
            slots,
            launchers,
            num_slots=num_slots,
            max_step_tokens=max_step_tokens,
            tail_words=tail_words,
            most_logits=self.most_sampled,
        )
        self._slots = slots
        self.launchers = launchers.drafts(slots.tokens, slots.counters, slots.tables, cache.block_size)
        self._propose = options.make(self.launchers, slots)
        self._resolved = torch.zeros(3, num_slots, dtype=torch.int32, device=decoder.device)
        self._proposals = torch.zeros(num_slots * (options.widest - 1), dtype=torch.int32, device=decoder.device)

    def pack_verify(self, step: PackedStep, batch: StepBatch, shape: VerifyShape) -> PackedRows:
        """Packs a step whose rows all sample, after one position or `shape.stride` at most; cuts drafts beyond."""
        rows = step.rows(batch, shape.rows, self.num_slots)
        counts = np.where(batch.starts < 0, np.minimum(batch.counts, shape.stride), 1)
        self._pack_counts(step, batch, counts, rows)
        rows.offsets[:] = np.arange(shape.rows + 1, dtype=np.int32) * shape.stride
        plan = step.plan(0, self._attention.verify_plan_words(shape.rows, shape.stride))
        every = np.arange(len(batch.slots))
        self._attention.plan_verify(self._verify_rows(batch, every, rows), plan, shape.rows, shape.stride)
        return replace(rows, stride=shape.stride, unknown=True)

    def pack_mixed(self, step: PackedStep, batch: StepBatch, bucket: int | None = None) -> MixedStep:
        """Packs a step of any rows; none of them drafts."""
        batch = replace(batch, counts=np.where(batch.starts < 0, 1, batch.counts).astype(np.int32))
        # Only of these the device's counter is the position of the next token.
        decodes = (batch.counts == 1) & batch.sample
        decode, prefill = np.flatnonzero(decodes), np.flatnonzero(~decodes)
        if bucket is None:
            shape = self._exact_shape(batch, len(decode), len(prefill))
        else:
            shape = self._captured_shape(bucket)
        rows = step.rows(batch, shape.num_rows, self.num_slots)
        self._pack_counts(step, batch, batch.counts, rows)
        firsts = rows.offsets[: len(batch.slots)]
        self._attention.plan_mixed(
            self._verify_rows(batch, decode, rows),
            PrefillRows(batch.starts[prefill], batch.counts[prefill], batch.slots[prefill], firsts[prefill]),
            step.plan(0, self._attention.mixed_plan_words(shape.decode_rows, shape.prefill_words)),
            shape.decode_rows,
            shape.prefill_words,
        )
        return MixedStep(replace(rows, unknown=bool((batch.starts < 0).any())), shape)

    def verify_variants(self, stream: Callable[[], int], shape: VerifyShape) -> list[Variant]:
        """Returns the ways to launch the pass that `packed` describes; each fills the rows of `logits`."""
        gather = partial(self._gathered_drafts, shape=shape)
        return self.variants(stream, WholePass(shape.num_tokens, gather, self._verify_attention(shape)))

    def given_variants(self, stream: Callable[[], int], shape: VerifyShape) -> list[Variant]:
        """Returns the same ways for drafts that `give` has given, without what drafts."""

        def gathered(stream: int) -> DeviceInputs:
            given = self._proposals[: shape.rows * (shape.stride - 1)].view(shape.rows, shape.stride - 1)
            return self._placed(stream, self.rows_on_device(shape.rows), given, shape.num_tokens)

        return self.variants(stream, WholePass(shape.num_tokens, gathered, self._verify_attention(shape)))

    def give(self) -> None:
        """Makes random tokens the drafts of `given_variants`."""
        self._proposals.random_(self.logits.shape[1])

    def rows_on_device(self, num_rows: int) -> DraftRows:
        """Returns the rows of the packed step, padding included."""
        layout = self.layout
        firsts, present, drafted = self._resolved[:, :num_rows]
        return DraftRows(
            slots=self._section(layout.slots, num_rows),
            starts=self._section(layout.starts, num_rows),
            counts=self._section(layout.counts, num_rows),
            limits=self._section(layout.limits, num_rows),
            offsets=self._section(layout.offsets, num_rows + 1),
            firsts=firsts,
            present=present,
            drafted=drafted,
        )

    def sampled(self, num_rows: int) -> Tensor:
        """Returns the rows of the packed step that sample, int32 [num_rows]."""
        return self._section(self.layout.sampled, num_rows)

    def _pack_counts(self, step: PackedStep, batch: StepBatch, counts: NDArray[np.int32], rows: PackedRows) -> None:
        layout, real, padded = self.layout, len(batch.slots), len(rows.slots)
        step.section(layout.counts, padded)[:real] = counts
        step.section(layout.counts, padded)[real:] = 0
        step.section(layout.limits, padded)[:real] = self._limits(batch)
        step.section(layout.limits, padded)[real:] = 0
        step.section(layout.sampled, len(rows.sample_rows))[:] = rows.sample_rows

    def _limits(self, batch: StepBatch) -> NDArray[np.int32]:
        """Returns the greatest position of a token of each row: the position before it has a place in its blocks."""
        slots = self._slots
        return np.minimum(slots.num_blocks[batch.slots] * self.cache.block_size, slots.tokens.shape[1] - 1)

    def _verify_rows(self, batch: StepBatch, chosen: NDArray[np.intp], rows: PackedRows) -> VerifyRows:
        slots, starts = batch.slots[chosen], batch.starts[chosen]
        lowest = highest = starts
        if len(batch.lowest):
            lowest, highest = batch.lowest[chosen], batch.highest[chosen]
        return VerifyRows(
            (lowest + 1).astype(np.int32), (highest + 1).astype(np.int32), slots, rows.offsets[:-1][chosen]
        )

    def _gathered_drafts(self, stream: int, shape: VerifyShape) -> DeviceInputs:
        rows = self.rows_on_device(shape.rows)
        proposals = None
        if shape.stride > 1:
            proposals = self._proposals[: shape.rows * (shape.stride - 1)].view(shape.rows, shape.stride - 1)
            self._propose(stream, rows, proposals)
        return self._placed(stream, rows, proposals, shape.num_tokens)

    def _forward_mixed(self, stream: int, shape: MixedShape) -> None:
        inputs = self._placed(stream, self.rows_on_device(shape.num_rows), None, shape.num_tokens)
        self._decoder.forward(stream, inputs, self.cache, self._mixed_attention(shape), shape.fusions)

    def _placed(self, stream: int, rows: DraftRows, proposals: Tensor | None, num_tokens: int) -> DeviceInputs:
        tokens, positions, slot_mapping = self._inputs[:, :num_tokens].unbind()
        self.launchers.place(stream, rows, proposals)
        self.launchers.gather(stream, rows, tokens, positions, slot_mapping)
        prompt_lens = self._section(self.layout.prompt_lens, len(rows.slots))
        return self._decoder.inputs(tokens, positions, slot_mapping, StepRows(rows.offsets, prompt_lens))

    def _verify_attention(self, shape: VerifyShape) -> StepAttention:
        plan, counters, drafted = self._plan_address(), self._slots.counters, self._resolved[2, : shape.rows]

        def attend(stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
            self._attention.run_verify(
                stream, layer, queries, output, plan, shape.rows, shape.stride, counters, drafted
            )

        return attend

    def _mixed_attention(self, shape: MixedShape) -> StepAttention:
        plan, counters = self._plan_address(), self._slots.counters

        def attend(stream: int, layer: int, queries: Tensor, output: Tensor) -> None:
            self._attention.run_mixed(
                stream, layer, queries, output, plan, shape.decode_rows, shape.prefill_words, counters=counters
            )

        return attend

    def _max_plan_words(self, max_step_tokens: int) -> int:
        words = [super()._max_plan_words(max_step_tokens)]
        for stride in self.strides:
            rows = min(self.num_slots, self.most_sampled // stride)
            words += [self._attention.verify_plan_words(each, stride) for each in range(1, rows + 1)]
        return max(words)
