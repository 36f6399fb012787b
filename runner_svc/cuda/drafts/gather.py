"""Launches kernels/gather_drafted.cu: gathers the inputs of a step whose rows `PlaceDrafts` has resolved."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load
from runner_svc.interface.draft_launchers import DraftRows

_THREADS = 128


class GatherDrafted:
    """Gathers inputs from a runner's token buffer and block tables, whose addresses must not change."""

    def __init__(self, token_buffer: Tensor, block_tables: Tensor, block_size: int, *, overlap: bool = False) -> None:
        """`token_buffer`: int32 [slots + 1, context_length]; `block_tables`: int32 [slots + 1, max_blocks]."""
        self._token_buffer, self._block_tables, self._block_size = token_buffer, block_tables, block_size
        kernel = load("gather_drafted", {})
        self._kernel = Kernel(kernel, "gather_drafted", "PPPPPPPPPiiiii", _THREADS, overlap=overlap)

    def __call__(self, stream: int, rows: DraftRows, tokens: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """Fills `tokens`, `positions` and `slot_mapping`, int32 [T].

        Places of a row beyond its present positions, and those beyond the last row's, are padding: token 0 at position
        0 of the dummy block.
        """
        num_tokens = len(tokens)
        self._kernel(
            stream,
            -(-num_tokens // _THREADS),
            rows.slots.data_ptr(),
            rows.firsts.data_ptr(),
            rows.present.data_ptr(),
            rows.offsets.data_ptr(),
            self._token_buffer.data_ptr(),
            self._block_tables.data_ptr(),
            tokens.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            len(rows.slots),
            num_tokens,
            self._token_buffer.shape[1],
            self._block_tables.shape[1],
            self._block_size,
        )
