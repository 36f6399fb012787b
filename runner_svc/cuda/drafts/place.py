"""Launches kernels/place_drafts.cu: resolves rows without a start and writes drafts into the token buffer."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import load
from runner_svc.interface.draft_launchers import DraftRows

_THREADS = 128


class PlaceDrafts:
    """Places drafts in a token buffer, whose address and whose counters' must not change."""

    def __init__(self, token_buffer: Tensor, counters: Tensor, vocab_size: int, *, overlap: bool = False) -> None:
        """`token_buffer`: int32 [slots + 1, context_length]; `counters`: int32 [slots + 1]."""
        self._token_buffer, self._counters, self._vocab_size = token_buffer, counters, vocab_size
        kernel = load("place_drafts", {})
        self._kernel = Kernel(kernel, "place_drafts", "PPPPPPPPPPiiii", _THREADS, overlap=overlap)

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor | None) -> None:
        """Fills `rows.firsts`, `rows.present` and `rows.drafted`; `proposals`: int32 [R, S]; None: no row drafts.

        A row's drafts end before its first proposal that is no token id, and at its count and its limit.
        """
        num_rows = len(rows.slots)
        self._kernel(
            stream,
            -(-num_rows // _THREADS),
            rows.slots.data_ptr(),
            rows.starts.data_ptr(),
            rows.counts.data_ptr(),
            rows.limits.data_ptr(),
            address_of(proposals),
            self._counters.data_ptr(),
            self._token_buffer.data_ptr(),
            rows.firsts.data_ptr(),
            rows.present.data_ptr(),
            rows.drafted.data_ptr(),
            num_rows,
            proposals.shape[1] if proposals is not None else 0,
            self._token_buffer.shape[1],
            self._vocab_size,
        )
