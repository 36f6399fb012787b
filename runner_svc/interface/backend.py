"""The interface between a runner, which executes plans, and a backend, which computes a `StepBatch`.

`BatchState` builds the batch from a plan; a backend knows neither plans, nor sockets, nor the slots' bookkeeping.

A `Backend` computes a batch while the caller waits. A `SlotBackend` keeps the token buffer and the block tables
itself. An `OverlappingBackend` keeps them on its device, so a batch may read tokens that the host has not yet seen:
the caller can launch the next batch before the current one is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.interface.slot_state import SlotState
from runner_svc.interface.step import PendingStep, StepBatch, StepOutput


class Backend(Protocol):
    """Owns weights and KV; executes batches in order. Any exception that it raises is a fault and ends the session."""

    model: plan_pb2.Model
    device: str  # "cpu", "cuda:0", "hash", "null"
    block_size: int  # tokens per KV block
    num_blocks: int  # plans use blocks 1 to num_blocks; block 0 is the backend's dummy block
    num_slots: int  # plans use slots 0 to num_slots - 1
    max_step_tokens: int  # maximum number of positions of one batch
    tile_tokens: int  # positions that are multiplied at once; a partly filled tile takes as long as a full one

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies whole blocks; all sources are read before any target is written."""

    def step(self, batch: StepBatch) -> StepOutput:
        """Writes the KV of every position and samples the rows marked in `sample`. A batch has at least one row.

        Rows that wait for masks are returned as the output's `masked_rows`, which samples them.
        """

    def is_broken_by(self, error: Exception) -> bool:
        """Returns whether this process can no longer compute after `error`, which the backend raised."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedSlot:
    """A sequence admitted to a slot, with the data that a device keeps of it."""

    state: SlotState
    params: np.void  # a record of ROW_PARAMS
    num_tokens: int  # number of leading state.tokens that are known
    blocks: NDArray[np.int32]  # its block table so far
    num_computed: int  # number of leading positions whose KV is in these blocks


@dataclass(frozen=True, slots=True, eq=False)
class ForcedTokens:
    """Tokens that a plan appends to the sequence in a slot."""

    slot: int
    first: int  # position of the first of them: the number of tokens before it
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class SlotChanges:
    """Changes of the slots by a plan: first admissions, then appends to block tables and of tokens."""

    admitted: list[AdmittedSlot]  # only admissions whose token ids are all in the vocabulary
    append_slots: NDArray[np.int32]  # [A]
    append_indexes: NDArray[np.int32]  # [A] index in the slot's table
    append_blocks: NDArray[np.int32]  # [A]
    forced: Sequence[ForcedTokens] = ()  # at most one for each slot


@runtime_checkable
class SlotBackend(Backend, Protocol):
    """Keeps the token buffer, the block tables and the parameters of the slots, and gathers its inputs from them.

    For each plan the caller calls `change_slots`, then, if the plan needs them, `copy_blocks` and `step`. Sampled
    tokens are in the token buffer for the next batch, always as a valid id, even if the row's logits were not finite.
    """

    def change_slots(self, changes: SlotChanges) -> None:
        """Updates token buffer, block tables and parameters before the next batch."""


@runtime_checkable
class OverlappingBackend(SlotBackend, Protocol):
    """Computes batches in launch order, without waiting for the host in between: `launch` instead of `step`."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launches the batch and returns without waiting for it."""
