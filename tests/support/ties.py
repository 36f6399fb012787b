"""Compares two greedy answers up to ties: kernels may differ in the last bits between batch shapes.

The first answer includes the two likeliest tokens at each position. Where the answers diverge, the second must have
taken the runner-up, by a gap in log-probability so small that rounding decides it. The texts after that differ and are
not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roster_client.client.events import TokenLogprobs

TIE_GAP = 1e-3
"""In nats. Float32 logits of magnitude 20 round by 1e-6; sums over layers raise this to about 1e-5."""
FLOAT16_TIE_GAP = 0.06
"""For tiny models, whose logits have a standard deviation of 1.5; `Precision` in `tests/support/parity.py` says why."""
BFLOAT16_TIE_GAP = 0.25
"""For a real model, as in `bench.answers.greedy_parity`."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The position where two answers diverge, and the gap there."""

    index: int
    gap: float
    """Log-probability of the likeliest token minus that of the runner-up."""
    took_runner_up: bool

    def is_tie(self, tie_gap: float = TIE_GAP) -> bool:
        """Whether rounding could have decided either way."""
        return self.took_runner_up and self.gap < tie_gap


def parting(solo: Sequence[int], logprobs: Sequence[TokenLogprobs], other: Sequence[int]) -> Parting | None:
    """Returns the first difference, or None. `logprobs`: of the solo tokens, with the two likeliest each.

    If one answer is a prefix of the other, they diverge at its end, which is never a tie.
    """
    for index, (mine, theirs) in enumerate(zip(solo, other, strict=False)):
        if mine != theirs:
            (_, best), (runner_up, second) = logprobs[index].top[:2]
            return Parting(index, best - second, theirs == runner_up)
    if len(solo) != len(other):
        return Parting(min(len(solo), len(other)), float("inf"), took_runner_up=False)
    return None
