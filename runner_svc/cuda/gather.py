"""Launches kernels/gather_inputs.cu: gathers a step's token ids, positions and cache positions on the device."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load

_THREADS = 128


class GatherInputs:
    """Gathers inputs from a runner's token buffer and block tables, whose addresses must not change."""

    def __init__(self, token_buffer: Tensor, block_tables: Tensor, block_size: int, *, overlap: bool = False) -> None:
        """`token_buffer`: int32 [slots + 1, context_length]; `block_tables`: int32 [slots + 1, max_blocks]."""
        self._token_buffer = token_buffer  # keeps the memory alive: the kernel receives addresses
        self._block_tables = block_tables
        self._block_size = block_size
        self._kernel = Kernel(load("gather_inputs", {}), "gather_inputs", "PPPPPPPPiiiii", _THREADS, overlap=overlap)

    def __call__(
        self,
        stream: int,
        slots: Tensor,
        starts: Tensor,
        offsets: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Fills `tokens`, `positions` and `slot_mapping`, int32 [T], for rows of `slots` and `starts`, int32 [R].

        `offsets` int32 [R + 1] has the index of each row's first position among the T, then the number of positions.
        Further entries up to T are padding: token 0 at position 0 of the dummy block. Rows may be empty.
        """
        num_tokens = tokens.shape[0]
        self._kernel(
            stream,
            -(-num_tokens // _THREADS),
            slots.data_ptr(),
            starts.data_ptr(),
            offsets.data_ptr(),
            self._token_buffer.data_ptr(),
            self._block_tables.data_ptr(),
            tokens.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            slots.shape[0],
            num_tokens,
            self._token_buffer.shape[1],
            self._block_tables.shape[1],
            self._block_size,
        )
