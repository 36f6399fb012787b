"""A step in flight whose draws were accepted on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runner_svc.gpu.pending_step import PendingCudaStep
from runner_svc.interface.step import StepOutput


@dataclass(frozen=True, slots=True, eq=False)
class PendingDraftedStep(PendingCudaStep):
    """A launched step of a backend that drafts."""

    stride: int = 1
    drafts: bool = False
    """Whether the batch has a column of drafts."""

    def _read(self) -> StepOutput:
        drawn, num_sampled = self._drawn, len(self.sample_rows)
        draws = self.buffers.tokens[: num_sampled * self.stride].reshape(num_sampled, self.stride)[drawn]
        outcomes = self.buffers.outcomes[:num_sampled][drawn]
        rows = self.sample_rows[drawn]
        drafted = np.zeros(self.num_rows, np.int32)
        drafted[rows] = outcomes >> 8 & 0xFF
        kept, statuses = outcomes.astype(np.uint8), (outcomes >> 16).astype(np.uint8)
        output = StepOutput.verified(rows, draws, kept, statuses, drafted)
        if not self.drafts:
            output.drafted = drafted[:0].astype(np.uint8)
        return output
