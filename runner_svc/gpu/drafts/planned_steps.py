"""Verifying passes whose drafts are drawn by passes with attention of their own, as first launches of the same graph.

That attention's plans lie behind those of the pass that verifies.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.decoder.cuda_decoder import DeviceInputs
from runner_svc.gpu.drafts.drafted_steps import DraftedSteps, VerifyShape
from runner_svc.gpu.step_buffers import PackedRows, PackedStep, aligned
from runner_svc.interface.attention_launcher import VerifyRows
from runner_svc.interface.draft_launchers import DraftRows
from runner_svc.interface.step import StepBatch


class PlannedDraft(Protocol):
    """What drafts, over the slots of a backend."""

    @property
    def plan_words(self) -> int:
        """The most words of the plans of a drafting pass."""

    def pack(self, rows: VerifyRows, plan: NDArray[np.int32], batch: int, drafts: int) -> None:
        """Fills `plan` [plan_words] for passes of up to `batch` rows that propose `drafts` tokens.

        `rows` are those of the pass that verifies.
        """

    def propose(self, stream: int, rows: DraftRows, prompt_lens: Tensor, proposals: Tensor, plan: int) -> None:
        """Fills `proposals`, int32 [R, S]; `plan`: the device address of what `pack` filled."""


D = TypeVar("D", bound=PlannedDraft)


class PlannedSteps(DraftedSteps, Generic[D]):
    """Passes that verify, with those of `draft` as their first launches."""

    def __init__(self, draft: D, *arguments: Any, **sizes: Any) -> None:
        """Further arguments as those of `DraftedSteps`."""
        self.draft = draft
        self._draft_plan = 0
        super().__init__(*arguments, **sizes)

    def pack_verify(self, step: PackedStep, batch: StepBatch, shape: VerifyShape) -> PackedRows:
        """As `DraftedSteps.pack_verify`, with the plans of what drafts."""
        rows = super().pack_verify(step, batch, shape)
        if shape.stride > 1:
            plan = step.plan(self._draft_plan, self.draft.plan_words)
            every = self._verify_rows(batch, np.arange(len(batch.slots)), rows)
            self.draft.pack(every, plan, shape.rows, shape.stride - 1)
        return rows

    def _gathered_drafts(self, stream: int, shape: VerifyShape) -> DeviceInputs:
        rows, proposals = self.rows_on_device(shape.rows), None
        if shape.stride > 1:
            proposals = self._proposals[: shape.rows * (shape.stride - 1)].view(shape.rows, shape.stride - 1)
            prompt_lens = self._section(self.layout.prompt_lens, shape.rows)
            plan = self._plan_address() + 4 * self._draft_plan
            self.draft.propose(stream, rows, prompt_lens, proposals, plan)
        return self._placed(stream, rows, proposals, shape.num_tokens)

    def _max_plan_words(self, max_step_tokens: int) -> int:
        self._draft_plan = aligned(super()._max_plan_words(max_step_tokens))
        return self._draft_plan + self.draft.plan_words
