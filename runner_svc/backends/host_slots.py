"""What a backend on the CPU keeps of the slots, as a device keeps it: `device_slots` in numpy.

The sampler writes into the token buffer, the next chunk reads from it, and nothing here asks whose slot it is: a token
that is written for a sequence that has left its slot becomes a wrong token of the next one there, as it would on a GPU.
That is what `LaunchedPlan` prevents, and what makes its failure visible where there is no GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runner_svc.batch.batch_inputs import gather_inputs
from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.step import StepBatch


class HostSlots:
    """Tokens, block tables, known positions and epochs by slot; the last row belongs to the dummy slot.

    Allocated zeroed and lazily by the operating system, as the host's own buffers are.
    """

    def __init__(self, num_slots: int, context_length: int, block_size: int) -> None:
        self.dummy_slot = num_slots
        self.tokens = np.zeros((num_slots + 1, context_length), np.int32)
        self.tables = np.zeros((num_slots + 1, -(-context_length // block_size)), np.int32)
        self.known = np.zeros(num_slots + 1, np.int32)
        """Positions whose token is there: a position beyond them holds what another sequence has left."""
        self.epochs = np.zeros(num_slots + 1, np.int64)
        """Sequences that each slot has had."""
        self.strays = 0
        """Tokens written into a slot that had another sequence by then: 0 unless the runner fails to redirect them."""
        self._block_size = block_size

    def change(self, changes: SlotChanges) -> None:
        """Admissions, then appends."""
        for admitted in changes.admitted:
            slot, count = admitted.state.slot, admitted.num_tokens
            self.tokens[slot, :count] = admitted.state.tokens[:count]
            self.tables[slot, : len(admitted.blocks)] = admitted.blocks
            self.known[slot] = count
            self.epochs[slot] += 1
        if len(changes.append_slots):
            self.tables[changes.append_slots, changes.append_indexes] = changes.append_blocks

    def gathered(self, batch: StepBatch) -> StepBatch:
        """The batch with its inputs. Raises RuntimeError where one is asked for that was never written."""
        if (batch.ends > self.known[batch.slots]).any():
            raise RuntimeError("a row reads a token that is not there yet")
        return gather_inputs(batch, self.tokens, self.tables, self._block_size)

    def redirected(self, slots: NDArray[np.int32], gone: NDArray[np.bool_] | None) -> NDArray[np.int32]:
        """The slots [L], but the dummy slot for those that are `gone` [L]."""
        return slots if gone is None else np.where(gone, self.dummy_slot, slots).astype(np.int32, copy=False)

    def write(
        self,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        tokens: NDArray[np.int32],
        epochs: NDArray[np.int64] | None = None,
    ) -> None:
        """Puts the `tokens` [L] that were sampled where they belong.

        `epochs` [L]: those of the slots when their rows were computed; None: they are the same.
        """
        if epochs is not None:
            self.strays += int((self.epochs[slots] != epochs)[slots != self.dummy_slot].sum())
        self.tokens[slots, positions] = tokens
        self.known[slots] = np.maximum(self.known[slots], positions + 1)
