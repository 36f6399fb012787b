"""A step in flight on the GPU: its host buffers and the wait for its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner_svc.gpu.masked_rows import CudaMaskedRows
from runner_svc.gpu.step_buffers import Ring, aligned
from runner_svc.interface.device import Device, Event, nanoseconds
from runner_svc.interface.step import StepOutput
from runner_svc.sampling.device_logprobs import PendingLogprobs


class HostBuffers:
    """One ring entry: page-locked memory for a step's input and its result."""

    def __init__(
        self, device: Device, words: int, most_draws: int, num_slots: int, check: Callable[[], None] | None = None
    ) -> None:
        """`check` raises an exception if a step that has ended may have no right result."""
        self.check = check
        self.input = device.pinned(words)
        self.words: NDArray[np.int32] = self.input.numpy()
        self.result = device.pinned(result_words(most_draws, num_slots))
        self.tokens: NDArray[np.int32] = self.result.numpy()[:most_draws]
        self.outcomes: NDArray[np.int32] = self.result.numpy()[aligned(most_draws) :]
        """Of rows whose draws were accepted on the device."""
        self.finite: NDArray[np.uint8] = self.outcomes.view(np.uint8)
        """The same place if each row has one draw: whether its logits were finite."""


def result_words(most_draws: int, num_slots: int) -> int:
    """Returns the words of a step's result: its draws, then what is known of each row."""
    return aligned(most_draws) + aligned(num_slots)


@dataclass(frozen=True, slots=True, eq=False)
class PendingCudaStep:
    """A launched step; implements `runner_svc.interface.step.PendingStep`."""

    num_rows: int
    sample_rows: NDArray[np.intp]
    masked_rows: CudaMaskedRows | None
    logprobs: list[PendingLogprobs]
    prompt_logprobs: list[PendingLogprobs]
    buffers: HostBuffers
    ring: Ring[HostBuffers]
    last_end: Event | None
    begin: Event
    forwarded: Event
    end: Event

    def done(self) -> bool:
        """Returns whether the GPU has finished."""
        return self.end.query()

    def wait(self) -> StepOutput:
        """Blocks until the step is done; frees its buffers."""
        behind: Event | None = self.end
        try:
            self.end.synchronize()
            behind = None
            if self.buffers.check is not None:
                self.buffers.check()
            output = self._read()
        finally:
            self.ring.free_entry(self.buffers, behind)
        counts = output.token_counts
        output.logprobs = [entry.message(int(counts[entry.row])) for entry in self.logprobs if counts[entry.row]]
        output.prompt_logprobs = [entry.message() for entry in self.prompt_logprobs]
        output.forward_ns = nanoseconds(self.begin, self.forwarded)
        output.sample_ns = nanoseconds(self.forwarded, self.end)
        output.idle_ns = nanoseconds(self.last_end, self.begin) if self.last_end is not None else 0
        return output

    def _read(self) -> StepOutput:
        """Returns the tokens in the buffers, without those of rows that wait for masks."""
        num_sampled = len(self.sample_rows)
        tokens = self.buffers.tokens[:num_sampled].copy()
        finite = self.buffers.finite[:num_sampled].astype(np.bool_)
        if self.masked_rows is None:
            return StepOutput.sampled(self.num_rows, self.sample_rows, tokens, finite)
        drawn = self._drawn
        return StepOutput.sampled(self.num_rows, self.sample_rows[drawn], tokens[drawn], finite[drawn])

    @property
    def _drawn(self) -> NDArray[np.bool_]:
        """bool [L]: the sampling rows that do not wait for masks."""
        if self.masked_rows is None:
            return np.ones(len(self.sample_rows), np.bool_)
        return np.isin(self.sample_rows, self.masked_rows.rows, invert=True)
