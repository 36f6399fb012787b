"""The GPU backend of a runner whose drafts Medusa's heads draw.

The heads are launches of the verifying pass, before its gather, so in its graph. They read the model's state at the
last position whose draw was kept, which the step that drew it has put aside: see `runner_svc.drafting.medusa`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.cuda_decoder import CudaDecoder
from runner_svc.decoder.hidden import Hidden
from runner_svc.drafting.medusa.heads import MedusaHead
from runner_svc.gpu.backend import Forward
from runner_svc.gpu.device_slots import DeviceSlots
from runner_svc.gpu.drafts.draft_draws import DraftDraws, record_word
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.drafted_steps import DraftedSteps
from runner_svc.gpu.drafts.drafting_backend import DraftingCudaBackend
from runner_svc.gpu.step_buffers import PackedRows, PackedStep, PlacedRecords
from runner_svc.gpu.steps import CudaSteps
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.draft_launchers import DraftRows
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.step import StepBatch
from runner_svc.sampling.sample_records import RECORD_WORDS

_KEPT = 0xFF
"""Bits of an outcome of `AcceptLauncher` with the number of draws kept."""


class MedusaDraft:
    """Heads over the states of the slots; implements `runner_svc.interface.draft_launchers.ProposeLauncher`."""

    def __init__(
        self, heads: Sequence[MedusaHead], decoder: CudaDecoder, draws: DraftDraws, slots: DeviceSlots, logits: Tensor
    ) -> None:
        """`logits`: room for those of all heads and rows of a pass, float32 [at least R * S, vocab_size]."""
        self.draws = draws
        self._heads, self._decoder, self._slots, self._logits = heads, decoder, slots, logits
        rows, device = len(slots.tokens), decoder.device
        self._states = torch.zeros(rows, decoder.config.hidden_size, dtype=decoder.dtype, device=device)
        """Residual stream of each slot at the position before its last known token."""
        self._counters = torch.full((rows,), -1, dtype=torch.int32, device=device)
        """Known tokens of each slot when its state was taken; -1: it has none."""
        self._firsts = torch.arange(rows, device=device)

    def forget(self, slots: Tensor) -> None:
        """Drops the states of `slots`, int64 [L]: other sequences are there."""
        self._counters.index_fill_(0, slots, -1)

    def observe(self, records: Tensor, outcomes: Tensor, stride: int, states: Tensor) -> None:
        """Keeps the residual stream from which the last token of each row was drawn, right after draws were accepted.

        `records`: words of SAMPLE_RECORD [L * stride]. `outcomes`: int32 [L]. `states` [L * stride, hidden_size].
        """
        count, dummy = len(outcomes), len(self._slots.tokens) - 1
        kept = outcomes & _KEPT
        slots = records.view(-1, RECORD_WORDS)[: count * stride : stride, record_word("slot")]
        slots = torch.where(kept > 0, slots, dummy).long()
        lasts = self._firsts[:count] * stride + (kept - 1).clamp(min=0)
        self._states.index_copy_(0, slots, states.index_select(0, lasts))
        self._counters.index_copy_(0, slots, self._slots.counters.index_select(0, slots))

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor) -> None:
        """Fills `proposals`, int32 [R, S]: -1 behind the last head, and for rows without a state."""
        count, heads = len(rows.slots), self._heads[: proposals.shape[1]]
        known = self._slots.counters.index_select(0, rows.slots)
        ready = (rows.counts > 0) & (self._counters.index_select(0, rows.slots) == known)
        states = self._decoder.normed(stream, Hidden(self._states.index_select(0, rows.slots), None))
        logits = self._logits_of(stream, heads, states)
        proposals.fill_(-1)
        for distance in range(len(heads)):
            own = logits[distance * count :][:count]
            positions = known + distance
            ready = ready & (positions <= rows.limits)
            self.draws.draw(stream, own, rows.slots, positions, ready, proposals[:, distance])

    def _logits_of(self, stream: int, heads: Sequence[MedusaHead], states: Tensor) -> Tensor:
        """Returns the logits of each head behind those of the head before, float32 [heads * R, vocab_size]."""
        hidden = torch.cat([head.hidden(states) for head in heads])
        logits = self._logits[: len(hidden)]
        if all(head.output is None for head in heads):
            self._decoder.head_logits(stream, hidden, logits)
            return logits
        for head, own, out in zip(heads, hidden.chunk(len(heads)), logits.chunk(len(heads)), strict=True):
            assert head.output is not None, "either all heads have an output matrix or none has"
            out.copy_(functional.linear(own, head.output))
        return logits


class MedusaSteps(DraftedSteps):
    """Passes that verify, with Medusa's heads as their first launches."""

    def __init__(self, heads: Sequence[MedusaHead], draws: DraftDraws, *arguments: Any, **sizes: Any) -> None:
        """Further arguments as those of `DraftedSteps`."""
        super().__init__(*arguments, **sizes)
        assert isinstance(self._decoder, CudaDecoder), "drafts are refused for others"
        # The pass fills the logits after it has drafted, at more places.
        self.medusa = MedusaDraft(heads, self._decoder, draws, self._slots, self.logits)
        self._propose = self.medusa
        self._selected: Tensor | None = None
        self._whole = self._decoder.workspace.residual

    def begin(self) -> None:
        """Notes that another pass is launched next."""
        self._selected = None

    def states(self, count: int) -> Tensor:
        """Returns the residual stream behind the last pass at the first `count` rows of `logits`."""
        return self._whole[:count] if self._selected is None else self._selected

    def _sampled_logits(self, stream: int, hidden: Hidden, out: Tensor) -> None:
        super()._sampled_logits(stream, hidden, out)
        self._selected = hidden.residual


class MedusaDraftingCudaBackend(DraftingCudaBackend):
    """Implements `runner_svc.interface.backend.OverlappingBackend`, with rows that Medusa's heads draft."""

    _steps: MedusaSteps

    def __init__(self, *arguments: Any, heads: Sequence[MedusaHead], drafts: DraftOptions, **options: Any) -> None:
        """Further arguments as those of `DraftingCudaBackend`."""
        self._heads = heads
        self._newcomers: list[int] = []
        super().__init__(*arguments, drafts=replace(drafts, max_drafts=min(drafts.max_drafts, len(heads))), **options)

    def change_slots(self, changes: SlotChanges) -> None:
        """As `CudaBackend.change_slots`."""
        super().change_slots(changes)
        self._newcomers += [admitted.state.slot for admitted in changes.admitted]

    def _pack(self, step: PackedStep, batch: StepBatch) -> tuple[PackedRows, Forward]:
        self._steps.begin()
        return super()._pack(step, batch)

    def _prepare_drafts(self, stream: int, batch: StepBatch, rows: PackedRows, records: PlacedRecords) -> None:
        if self._newcomers:
            self._steps.medusa.forget(self._index(np.array(self._newcomers)))
            self._newcomers = []
        if rows.unknown and rows.stride > 1:
            self._steps.medusa.draws.take(records, self._steps.packed)

    def _accepted(self, records: Tensor, outcomes: Tensor, stride: int) -> None:
        self._steps.medusa.observe(records, outcomes, stride, self._steps.states(len(outcomes) * stride))

    def _make_steps(self, cache: KVCache) -> CudaSteps:
        self._heads = [head.to(self._device.device, self._decoder.dtype) for head in self._heads]
        return self._drafted(partial(MedusaSteps, self._heads, self._make_draft_draws()), cache)
