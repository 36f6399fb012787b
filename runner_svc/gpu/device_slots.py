"""The device's state of the slots: the token buffer, the block tables and counters, in one tensor of words.

All are parts of one int32 tensor, so that one kernel applies all changes of a plan as a list of copied segments.
There is one row per slot; the last one belongs to the dummy slot. Its table stays zero. No step reads its tokens, which
were sampled after their slot had passed to another sequence.

A slot's counter is its number of known tokens, for steps whose first positions the host does not know. Only a backend
that drafts has them. An admission writes it, then the kernel that accepts tokens, and a plan that appends some.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.interface.backend import SlotChanges
from runner_svc.interface.kv_cache import KVCache

HEADER_WORDS = 8
# Rows of the table of segments.
_TARGETS, _SOURCES, _LENGTHS = range(3)


class DeviceSlots:
    """The tensor `words` and its parts `tokens`, `tables` and `counters`, all int32, at fixed addresses."""

    def __init__(
        self, num_slots: int, context_length: int, max_blocks: int, device: torch.device, *, counted: bool = False
    ) -> None:
        """`counted`: slots have counters; without, `counters` is empty."""
        rows = num_slots + 1
        tables, end = rows * context_length, rows * (context_length + max_blocks)
        self.words = torch.zeros(end + rows * counted, dtype=torch.int32, device=device)
        self.tokens: Tensor = self.words[:tables].view(rows, context_length)
        self.tables: Tensor = self.words[tables:end].view(rows, max_blocks)
        self.counters: Tensor = self.words[end:]
        self.num_blocks: NDArray[np.int32] = np.zeros(rows * counted, np.int32)
        """Length of each slot's table once the encoded changes are applied; empty without counters."""
        self._counted = counted
        self._context_length = context_length
        self._max_blocks = max_blocks
        self._tables_begin = tables
        self._counters_begin = end

    def spread(self, num_positions: int, cache: KVCache) -> None:
        """Gives each slot its own table for `num_positions`, as far as the blocks suffice; used to time steps."""
        slots, width = len(self.tables) - 1, min(self._max_blocks, -(-num_positions // cache.block_size))
        blocks = 1 + torch.arange(slots * width, dtype=torch.int32, device=self.words.device) % cache.num_blocks
        self.tables[:slots, :width] = blocks.view(slots, width)

    def encode(self, changes: SlotChanges) -> NDArray[np.int32] | None:
        """Returns the changes as segments, or None if nothing changed.

        int32 [8 + 3 * n + data]: a header whose first word is the number of segments n; the segments' offsets in
        `words`, their offsets in the data, and their lengths, n each; then the data. Segments never overlap: a table's
        appends lie beyond the blocks that its admission wrote, and no plan appends tokens to a sequence that it admits.
        """
        parts: list[NDArray[np.int32]] = []
        targets: list[int] = []
        for admitted in changes.admitted:
            slot = admitted.state.slot
            parts += [admitted.state.tokens[: admitted.num_tokens], admitted.blocks]
            targets += [slot * self._context_length, self._tables_begin + slot * self._max_blocks]
            if self._counted:
                parts.append(np.array([admitted.num_tokens], np.int32))
                targets.append(self._counters_begin + slot)
                self.num_blocks[slot] = len(admitted.blocks)
        for forced in changes.forced:
            parts.append(forced.tokens)
            targets.append(forced.slot * self._context_length + forced.first)
            if self._counted:
                parts.append(np.array([forced.first + len(forced.tokens)], np.int32))
                targets.append(self._counters_begin + forced.slot)
        lengths = [len(part) for part in parts]
        if self._counted:
            np.add.at(self.num_blocks, changes.append_slots, 1)
        num_segments = len(parts) + len(changes.append_slots)
        if not num_segments:
            return None
        data_begin = HEADER_WORDS + 3 * num_segments
        words = np.zeros(data_begin + sum(lengths) + len(changes.append_slots), np.int32)
        words[0] = num_segments
        table = words[HEADER_WORDS:data_begin].reshape(3, num_segments)
        table[_TARGETS, : len(parts)] = targets
        appended = self._tables_begin + changes.append_slots.astype(np.int64) * self._max_blocks
        table[_TARGETS, len(parts) :] = appended + changes.append_indexes
        table[_LENGTHS, : len(parts)] = lengths
        table[_LENGTHS, len(parts) :] = 1
        np.cumsum(table[_LENGTHS, :-1], out=table[_SOURCES, 1:])
        np.concatenate([*parts, changes.append_blocks], out=words[data_begin:])
        return words
