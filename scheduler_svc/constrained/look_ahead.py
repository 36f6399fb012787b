"""Decides when to look ahead for forced tokens before a plan is made, instead of while its step is computed.

A look ahead takes a round trip to the mask process, for which the runner's next plan waits. If forced tokens begin, it
saves the step that would compute the first of them. So it pays by how often they begin after a token of a sequence, and
by the time of a step, both measured.
"""

from __future__ import annotations

from scheduler_svc.model.sequence import Sequence

_MARGIN = 1.5
"""Expected gain over expected wait from which it pays."""
_NEW = 1 / 16
"""Weight of the latest observation in an average."""
_LEAST_HOLD_S, _MOST_HOLD_S = 0.001, 0.01
"""Bounds of the time for which a plan is held back: a constraint may be slow."""


class LookAhead:
    """Averages of one engine."""

    def __init__(self) -> None:
        self._wait_s, self._step_s = 2e-4, 0.0
        self._asked_at = 0.0
        self.run = 8.0
        """Tokens of a run."""

    def stepped(self, step_s: float) -> None:
        """Notes the time of a step with constrained rows."""
        self._step_s += (step_s - self._step_s) * (_NEW if self._step_s else 1.0)

    def note(self, sequence: Sequence, run: int) -> None:
        """Notes how many forced tokens began after a token of the sequence."""
        sequence.forced_share += ((run > 0) - sequence.forced_share) * _NEW
        if run:
            self.run += (run - self.run) * _NEW

    def pays(self, sequences: list[Sequence], running: int) -> bool:
        """Returns whether to look ahead for these of the `running` sequences of a runner."""
        share = sum(sequence.forced_share for sequence in sequences)
        return share * self._step_s > _MARGIN * self._wait_s * running

    def asked(self, now_s: float) -> float:
        """Notes a request; returns until when the plan waits for the answer."""
        self._asked_at = now_s
        return now_s + min(_MOST_HOLD_S, max(_LEAST_HOLD_S, 4 * self._wait_s))

    def answered(self, now_s: float) -> None:
        """Notes the answer to the latest request."""
        self._wait_s += (now_s - self._asked_at - self._wait_s) * _NEW
