"""A backend that records its calls and gives predefined results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.backends.null_backend import NullBackend
from runner_svc.interface.step import StepBatch, StepOutput


class SpyBackend(NullBackend):
    """4 slots of at most 64 positions, 20 blocks of 4 tokens. Row r of a step samples token 10 + r."""

    def __init__(self) -> None:
        super().__init__(num_slots=4, block_size=4, num_blocks=20, max_step_tokens=32, context_length=64)
        self.calls: list[tuple[str, object]] = []
        self.bad_slots: set[int] = set()  # slots whose rows result in NOT_FINITE
        self.on_step: Callable[[StepBatch], None] = lambda batch: None

    @property
    def batches(self) -> list[StepBatch]:
        """Steps so far."""
        return [argument for name, argument in self.calls if isinstance(argument, StepBatch)]

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Records the pairs."""
        self.calls.append(("copy", list(zip(sources.tolist(), targets.tolist(), strict=True))))

    def step(self, batch: StepBatch) -> StepOutput:
        """Records the batch."""
        self.calls.append(("step", batch))
        self.on_step(batch)
        rows = np.flatnonzero(batch.sample)
        finite = ~np.isin(batch.slots[rows], list(self.bad_slots))
        output = StepOutput.sampled(len(batch.slots), rows, (rows + 10).astype(np.int32), finite)
        output.logprobs = [
            plan_pb2.RowLogprobs(row=row) for row in rows.tolist() if batch.states[row].logprobs is not None
        ]
        return output
