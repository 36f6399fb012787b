"""Drafts what followed the last time that the sequence's latest tokens occurred in it, in prompt or output.

Answers that quote their prompt (edits, extracts, code) and text that repeats itself are drafted well; other text is
drafted rarely, as nothing is proposed where even the last token is new. (Saxena 2023, prompt lookup decoding.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runner_svc.drafting.drafter import no_proposals

LONGEST = 8
"""Tokens from which one match is as good as another."""
WINDOW = 8192
"""Latest tokens that are searched."""


class NgramDrafter:
    """Implements `runner_svc.drafting.drafter.Drafter`.

    A row costs a comparison of each token of its window, and then little: the longer the match that is looked for, the
    fewer places are left.
    """

    name = "ngram"

    def __init__(self, longest: int = LONGEST, window: int = WINDOW) -> None:
        """`longest`: length from which matches are equally good, in tokens; `window`: number of tokens searched."""
        self._longest = longest
        self._window = window

    def propose(
        self,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        counters: NDArray[np.int32],
        most: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        proposals = no_proposals(most)
        rows = zip(slots.tolist(), counters.tolist(), most.tolist(), strict=True)
        for row, (slot, known, count) in enumerate(rows):
            text = tokens[slot, max(0, known - self._window) : known]
            end = self._match_end(text) if count else 0
            if end:
                # What followed may reach the end of the text: then it repeats itself.
                proposals[row, :count] = text[end + np.arange(count) % (len(text) - end)]
        return proposals

    def _match_end(self, text: NDArray[np.int32]) -> int:
        """Returns the end of the latest of the longest matches of `text`'s last tokens before its end; 0 if none."""
        if len(text) < 2:
            return 0
        lasts = np.flatnonzero(text[:-1] == text[-1])
        for back in range(1, min(self._longest, len(text) - 1)):
            longer = lasts[np.searchsorted(lasts, back) :]
            longer = longer[text[longer - back] == text[-1 - back]]
            if not len(longer):
                break
            lasts = longer
        return int(lasts[-1]) + 1 if len(lasts) else 0
