"""Rows of a GPU step that wait for masks: their logits are copied and sampled once the masks arrive.

Forward passes of later plans are launched meanwhile. They have no rows of these sequences, so the token may be written
late: into the row's slot or, if its sequence has left the slot, into the dummy slot, which no step reads. Sampling
needs nothing but the mask and the copied logits: penalties, which count the tokens in the slot, were applied to the
logits in the row's own step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.interface.device import Device, Event, nanoseconds
from runner_svc.interface.launchers import LogprobsLauncher, SamplingLauncher
from runner_svc.interface.step import MaskedRows, StepBatch, StepOutput
from runner_svc.sampling.device_logprobs import PendingLogprobs, launch_row_logprobs
from runner_svc.sampling.sample_records import pack_rows


class CudaMaskedRows:
    """Implements `runner_svc.interface.step.MaskedRows`."""

    def __init__(
        self,
        batch: StepBatch,
        logits: Tensor,
        sampling: SamplingLauncher,
        logprobs: LogprobsLauncher,
        device: Device,
        dummy_slot: int,
    ) -> None:
        """`logits` [W, vocab_size]: a copy of the adjusted logits of `batch.awaits`."""
        self.rows = batch.awaits
        self._batch = batch
        self._logits = logits
        self._sampling, self._logprobs = sampling, logprobs
        self._device = device
        self._dummy_slot = dummy_slot

    @torch.inference_mode()
    def sample(self, masks: NDArray[np.uint32], gone: NDArray[np.bool_]) -> PendingMaskedRows:
        """Launches the sampler over the rows; `masks` [W, ceil(vocab_size / 32)] and `gone` [W] as in `MaskedRows`."""
        packed = pack_rows(self._batch, self.rows)
        packed.records["slot"][gone] = self._dummy_slot
        packed.records["adjusted"] = False
        with self._device.stream() as stream:
            begin = self._device.event()
            tokens = torch.empty(len(self.rows), dtype=torch.int32, device=self._device.device)
            finite = torch.empty(len(self.rows), dtype=torch.uint8, device=self._device.device)
            self._sampling(
                stream,
                self._logits,
                self._moved(packed.records.view(np.int32)),
                self._moved(packed.extra_ids),
                self._moved(packed.extra_values),
                tokens,
                finite,
                adjusted=False,
                masks=self._moved(masks.view(np.int32)),
            )
            logprobs = launch_row_logprobs(
                self._logprobs, stream, self._logits, tokens, self._batch, self.rows, packed.asking
            )
            on_host = tokens.to("cpu", non_blocking=True), finite.to("cpu", non_blocking=True)
            end = self._device.event()
        return PendingMaskedRows(len(self._batch.slots), self.rows, *on_host, logprobs, begin, end)

    def _moved(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device.device)


@dataclass(frozen=True, slots=True, eq=False)
class PendingMaskedRows:
    """Masked rows whose sampling is launched."""

    num_rows: int  # of the whole batch
    rows: NDArray[np.intp]
    tokens: Tensor  # int32 [W], valid after `end`
    finite: Tensor  # uint8 [W], valid after `end`
    logprobs: list[PendingLogprobs]
    begin: Event
    end: Event

    @property
    def masked_rows(self) -> MaskedRows | None:
        """None: no row waits any more."""
        return None

    def done(self) -> bool:
        """Returns whether the GPU has finished."""
        return self.end.query()

    def wait(self) -> StepOutput:
        """Blocks until the rows are sampled."""
        self.end.synchronize()
        finite = self.finite.numpy().astype(np.bool_)
        output = StepOutput.sampled(self.num_rows, self.rows, self.tokens.numpy(), finite)
        output.logprobs = [entry.message() for entry in self.logprobs if output.token_counts[entry.row]]
        output.sample_ns = nanoseconds(self.begin, self.end)
        return output
