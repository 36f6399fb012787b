"""Of which positions a draft model has KV: by slot, and by block, so that a prefix hit brings it along.

A draft model's KV lies under the same block ids as the target's. The scheduler knows only the target's part: a block
that is ready there may lack the draft's, because its positions were computed while nothing drafted. So a block is
marked once the draft's KV of all its positions was computed from known tokens, and loses the mark when a sequence gets
it for new positions. A slot's *drafted* positions are leading ones with the draft's KV of known tokens. Wrong values
would only be worse drafts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runner_svc.interface.backend import SlotChanges


class DraftCounters:
    """Drafted positions by slot, marks by block."""

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, *, by_prompt: bool = False) -> None:
        """`by_prompt`: KV depends on the length of the prompt, so that other sequences' says nothing."""
        self.drafted = np.zeros(num_slots, np.int32)
        """Leading positions of each slot's sequence with KV of known tokens; less than its known tokens."""
        self.marks = np.zeros(num_blocks + 1, np.bool_)
        """Blocks whose positions all have KV of known tokens; block 0 is the dummy block."""
        self._marked = np.zeros(num_slots, np.int32)  # leading blocks of each slot that need no mark any more
        self._tables = np.zeros((0, 0), np.int32)
        self._block_size = block_size
        self._by_prompt = by_prompt

    def change(self, changes: SlotChanges, tables: NDArray[np.int32]) -> None:
        """Follows admissions, then appends; as `SlotDrafter.change`."""
        self._tables = tables
        for admitted in changes.admitted:
            shared = admitted.num_computed // self._block_size
            self.marks[admitted.blocks[shared:]] = False
            marks = self.marks[admitted.blocks[:shared]]
            leading = shared if marks.all() else int(marks.argmin())
            slot, leading = admitted.state.slot, 0 if self._by_prompt else leading
            self.drafted[slot] = min(leading * self._block_size, admitted.num_tokens - 1)
            self._marked[slot] = leading
        if len(changes.append_slots):
            self.marks[changes.append_blocks] = False

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copies the marks of blocks."""
        self.marks[targets] = self.marks[sources]

    def forget_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Removes the marks of blocks, which no slot has."""
        self.marks[blocks] = False

    def settle(self, slots: NDArray[np.int32], known: NDArray[np.int32]) -> None:
        """Forgets positions from the last of `known` [L] tokens of `slots` [L] on: their KV may be of wrong drafts."""
        self.drafted[slots] = np.minimum(self.drafted[slots], known - 1)
        self._mark(slots)

    def advance(self, slots: NDArray[np.int32], ends: NDArray[np.int32]) -> None:
        """Notes that the positions below `ends` [L] of `slots` [L] have KV.

        `settle` must follow before a block may be hit: the last of them may be of drafts.
        """
        self.drafted[slots] = ends

    def _mark(self, slots: NDArray[np.int32]) -> None:
        full = self.drafted[slots] // self._block_size
        fresh = full > self._marked[slots]
        for slot, count in zip(slots[fresh].tolist(), full[fresh].tolist(), strict=True):
            self.marks[self._tables[slot, self._marked[slot] : count]] = True
            self._marked[slot] = count
