"""Slot state of a backend on the CPU, kept as on a device: `device_slots` in numpy.

The sampler writes into the token buffer and the next chunk reads from it, without a check of which sequence has the
slot. A token written for a sequence that has left its slot becomes a wrong token of the slot's next sequence, as on a
GPU. `LaunchedPlan` prevents this; here a failure to do so shows up without a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runner_svc.batch.batch_inputs import gather_inputs
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.step import StepBatch


class HostSlots:
    """Tokens, block tables, known positions and epochs by slot; the last row belongs to the dummy slot.

    The operating system allocates them zeroed and lazily, like the buffers of `BatchState`.
    """

    def __init__(self, num_slots: int, context_length: int, block_size: int) -> None:
        self.dummy_slot = num_slots
        self.tokens = np.zeros((num_slots + 1, context_length), np.int32)
        self.tables = np.zeros((num_slots + 1, -(-context_length // block_size)), np.int32)
        self.known = np.zeros(num_slots + 1, np.int32)
        """Number of positions with a token; later positions contain an earlier sequence's tokens."""
        self.epochs = np.zeros(num_slots + 1, np.int64)
        """Number of sequences admitted to each slot so far."""
        self.strays = 0
        """Tokens written into a slot after its sequence had changed: 0 unless the runner fails to redirect them."""
        self._block_size = block_size

    def change(self, changes: SlotChanges) -> None:
        """Applies admissions, then appends."""
        for admitted in changes.admitted:
            slot, count = admitted.state.slot, admitted.num_tokens
            self.tokens[slot, :count] = admitted.state.tokens[:count]
            self.tables[slot, : len(admitted.blocks)] = admitted.blocks
            self.known[slot] = count
            self.epochs[slot] += 1
        if len(changes.append_slots):
            self.tables[changes.append_slots, changes.append_indexes] = changes.append_blocks

    def gathered(self, batch: StepBatch) -> StepBatch:
        """Returns the batch with its inputs. Raises RuntimeError if an input token has not been written yet."""
        if (batch.ends > self.known[batch.slots]).any():
            raise RuntimeError("a row reads a token that has not been written yet")
        return gather_inputs(batch, self.tokens, self.tables, self._block_size)

    def redirected(self, slots: NDArray[np.int32], gone: NDArray[np.bool_] | None) -> NDArray[np.int32]:
        """Returns the slots [L], with those that are `gone` [L] replaced by the dummy slot."""
        return slots if gone is None else np.where(gone, self.dummy_slot, slots).astype(np.int32, copy=False)

    def write(
        self,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        tokens: NDArray[np.int32],
        epochs: NDArray[np.int64] | None = None,
    ) -> None:
        """Writes sampled `tokens` [L] to `positions` of `slots`.

        `epochs` [L] are the slots' epochs when the rows were computed; None means that they have not changed.
        """
        if epochs is not None:
            self.strays += int((self.epochs[slots] != epochs)[slots != self.dummy_slot].sum())
        self.tokens[slots, positions] = tokens
        self.known[slots] = np.maximum(self.known[slots], positions + 1)
