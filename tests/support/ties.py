"""Are two greedy answers the same, up to ties? Kernels may differ in the last bits between batch shapes.

The first answer has its two likeliest tokens at each place. Where the answers part, the second one must have taken the
runner-up, by a gap in log-probability so small that rounding decides it; what follows is another text: it says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roster_client.client.events import TokenLogprobs

TIE_GAP = 1e-3
"""Natural log units. Float32 logits of magnitude 20 are rounded by 1e-6; sums over layers make some 1e-5 of it."""
FLOAT16_TIE_GAP = 0.06
"""Of tiny models, whose logits have a standard deviation of 1.5: `Precision` says why, in `tests/support/parity.py`."""
BFLOAT16_TIE_GAP = 0.25
"""Of a real model, as in `bench.answers.greedy_parity`."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers part, and by how little."""

    index: int
    gap: float
    """Log-probability of the likeliest token less that of the runner-up."""
    took_runner_up: bool

    def is_tie(self, tie_gap: float = TIE_GAP) -> bool:
        """It could have gone either way."""
        return self.took_runner_up and self.gap < tie_gap


def parting(solo: Sequence[int], logprobs: Sequence[TokenLogprobs], other: Sequence[int]) -> Parting | None:
    """The first difference; None where there is none. `logprobs`: of the solo tokens, with the two likeliest each.

    An answer that is shorter than the other parts where it ends, which is never a tie.
    """
    for index, (mine, theirs) in enumerate(zip(solo, other, strict=False)):
        if mine != theirs:
            (_, best), (runner_up, second) = logprobs[index].top[:2]
            return Parting(index, best - second, theirs == runner_up)
    if len(solo) != len(other):
        return Parting(min(len(solo), len(other)), float("inf"), took_runner_up=False)
    return None
