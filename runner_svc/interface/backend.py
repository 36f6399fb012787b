"""The seam between a runner, which knows plans, and a backend, which computes: `StepBatch` in, `StepOutput` out.

`BatchState` builds the batch from a plan; a backend sees no plan, no socket and no slot bookkeeping.

A `Backend` computes a batch while the caller waits. A `SlotBackend` keeps the token buffer and the block tables
itself. An `OverlappingBackend` does that on its device, so that a batch's input tokens may be ones that the host has
not seen yet: it starts a batch and lets the caller start the next before the first is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.interface.slot_state import SlotState
from runner_svc.interface.step import PendingStep, StepBatch, StepOutput


class Backend(Protocol):
    """Owns weights and KV; executes batches in order. An exception out of it is a fault: the session is over."""

    model: plan_pb2.Model
    device: str  # "cpu", "cuda:0", "hash", "null"
    block_size: int  # tokens per KV block
    num_blocks: int  # blocks that plans may name, 1 to num_blocks; block 0 is the backend's dummy
    num_slots: int  # slots that plans may name, 0 to num_slots - 1
    max_step_tokens: int  # most positions of one batch
    tile_tokens: int  # positions that are multiplied at once: a tile that is not full takes as long

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks; all sources are read before any target is written."""

    def step(self, batch: StepBatch) -> StepOutput:
        """Writes the KV of every position, samples the rows that ask for it. A batch has at least one row.

        Rows that wait for masks are `masked_rows` of the output, and sampled by it.
        """

    def is_broken_by(self, error: Exception) -> bool:
        """Whether nothing can be computed any more in this process after `error`, which came out of the backend."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedSlot:
    """A sequence that entered a slot: what a device needs to hold of it."""

    state: SlotState
    params: np.void  # a record of ROW_PARAMS
    num_tokens: int  # the first so many of state.tokens are known
    blocks: NDArray[np.int32]  # its block table so far


@dataclass(frozen=True, slots=True, eq=False)
class SlotChanges:
    """What a plan changed in the slots, in this order: admissions, then appends to block tables."""

    admitted: list[AdmittedSlot]  # those that can be computed with: all their token ids are of the vocabulary
    append_slots: NDArray[np.int32]  # [A]
    append_indexes: NDArray[np.int32]  # [A] place in the slot's table
    append_blocks: NDArray[np.int32]  # [A]


@runtime_checkable
class SlotBackend(Backend, Protocol):
    """Keeps the token buffer, the block tables and the parameters of the slots itself, and gathers its inputs there.

    For each plan the caller says `change_slots`, then `copy_blocks`, then `step`, the last two where there is need.
    What the sampled rows of a batch drew is in the token buffer for the next batch, a valid id in any case, also where
    the row's logits were not finite.
    """

    def change_slots(self, changes: SlotChanges) -> None:
        """Brings token buffer, block tables and parameters up to date before the next batch."""


@runtime_checkable
class OverlappingBackend(SlotBackend, Protocol):
    """Computes batches in the order of their launches, without the host's word between them: `launch` for `step`."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """Starts what `step` does, and returns."""
