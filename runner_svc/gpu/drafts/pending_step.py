"""A step in flight whose draws were accepted on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner_svc.gpu.pending_step import HostBuffers, PendingCudaStep
from runner_svc.gpu.step_buffers import aligned
from runner_svc.interface.device import Device
from runner_svc.interface.step import StepOutput


def result_words(most_sampled: int, num_slots: int) -> int:
    """Returns the words of a step's result: its draws, then the outcomes of its rows."""
    return aligned(most_sampled) + aligned(num_slots)


class DraftedBuffers(HostBuffers):
    """One ring entry of a backend that drafts."""

    def __init__(self, device: Device, words: int, most_sampled: int, num_slots: int) -> None:
        self.input = device.pinned(words)
        self.words: NDArray[np.int32] = self.input.numpy()
        self.result = device.pinned(result_words(most_sampled, num_slots))
        self.tokens: NDArray[np.int32] = self.result.numpy()[:most_sampled]
        self.outcomes: NDArray[np.int32] = self.result.numpy()[aligned(most_sampled) :]
        self.finite = np.zeros(0, np.uint8)  # outcomes say it


@dataclass(frozen=True, slots=True, eq=False)
class PendingDraftedStep(PendingCudaStep):
    """A launched step of a backend that drafts."""

    stride: int = 1
    drafts: bool = False
    """Whether the batch has a column of drafts."""

    def _read(self) -> StepOutput:
        assert isinstance(self.buffers, DraftedBuffers)
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
