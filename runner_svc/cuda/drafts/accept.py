"""Launches kernels/accept_drafts.cu: keeps the draws up to the first that differs from its draft."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load

_THREADS = 128


class AcceptDrafts:
    """Writes kept draws to a token buffer and sets its counters, whose addresses must not change."""

    def __init__(self, token_buffer: Tensor, counters: Tensor) -> None:
        """`token_buffer`: int32 [slots + 1, context_length]; `counters`: int32 [slots + 1]."""
        self._token_buffer, self._counters = token_buffer, counters
        self._kernel = Kernel(load("accept_drafts", {}), "accept_drafts", "PPPPPPiii", _THREADS)

    def __call__(
        self, stream: int, records: Tensor, draws: Tensor, finite: Tensor, outcomes: Tensor, stride: int
    ) -> None:
        """Accepts the draws of L rows, `stride` each, and fills `outcomes`, int32 [L].

        `records`: words of SAMPLE_RECORD [L * stride], of which `reserved` marks rows that are drawn again later, and
        position 0 absent draws; `draws`: int32, `finite`: uint8, both [L * stride]. An outcome is kept | drafted << 8
        | status << 16.
        """
        num_rows = len(outcomes)
        self._kernel(
            stream,
            -(-num_rows // _THREADS),
            records.data_ptr(),
            draws.data_ptr(),
            finite.data_ptr(),
            self._token_buffer.data_ptr(),
            self._counters.data_ptr(),
            outcomes.data_ptr(),
            num_rows,
            stride,
            self._token_buffer.shape[1],
        )
