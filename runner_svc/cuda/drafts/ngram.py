"""Launches kernels/ngram_draft.cu: drafts what followed the longest recent match of a row's last tokens."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load
from runner_svc.drafting.ngram import LONGEST, WINDOW
from runner_svc.interface.draft_launchers import DraftRows

_THREADS = 512


class NgramDraft:
    """Proposals from a token buffer and its counters, whose addresses must not change."""

    def __init__(
        self,
        token_buffer: Tensor,
        counters: Tensor,
        *,
        longest: int = LONGEST,
        window: int = WINDOW,
        overlap: bool = False,
    ) -> None:
        """`token_buffer`: int32 [slots + 1, context_length]; `counters`: int32 [slots + 1]."""
        self._token_buffer, self._counters = token_buffer, counters
        defines = {"THREADS": _THREADS, "MOST": longest, "WINDOW": window}
        self._kernel = Kernel(load("ngram_draft", defines), "ngram_draft", "PPPPPPii", _THREADS, overlap=overlap)

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor) -> None:
        """Fills `proposals`, int32 [R, S], with what `runner_svc.drafting.ngram` proposes."""
        self._kernel(
            stream,
            len(rows.slots),
            rows.slots.data_ptr(),
            rows.starts.data_ptr(),
            rows.counts.data_ptr(),
            self._counters.data_ptr(),
            self._token_buffer.data_ptr(),
            proposals.data_ptr(),
            proposals.shape[1],
            self._token_buffer.shape[1],
        )
