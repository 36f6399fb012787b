"""What counts against a request: the losses of runners that it may have caused.

Most losses are nobody's fault, and some prove it: a process that comes back as if nothing had been was not crashed by
what it ran, and a runner that loses the scheduler's own probe too is ill itself. Those are forgiven. But a request may
also make a runner silent for so long that it is given up, each time that it is tried: so who does not get further
between them is forgiven `PARDONS` times, and then no more. A verdict does not wait: the loss that rejects does so
before anybody knows whether its process comes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.link.runner_events import Loss

STRIKES = 2
"""Losses that make a request run isolated only."""
LONE_LOSSES = 2
"""Losses of runners that it had for itself that reject a request: of two runners, where there are two."""
PARDONS = 3
"""Losses that are forgiven to a request that has not got further since the first."""


@dataclass(slots=True, frozen=True)
class LoneLoss:
    """A runner was lost that computed nothing else."""

    runner_id: str
    loss: Loss


@dataclass(slots=True)
class Suspicion:
    """Counters of one request."""

    strikes: int = 0
    """Losses of runners where it had rows, among others."""
    lone_losses: list[LoneLoss] = field(default_factory=list)
    """Those of runners that it had for itself in an isolation."""
    pardons: int = 0
    """Losses forgiven since it last got further."""
    pardoned_at: int = -1
    """Tokens that it had then."""

    @property
    def is_held(self) -> bool:
        """It runs isolated only."""
        return self.strikes >= STRIKES

    @property
    def is_rejected(self) -> bool:
        """Chance is no longer the better explanation."""
        return len(self.lone_losses) >= LONE_LOSSES

    def failed_on(self, runner_id: str) -> bool:
        """Was this runner lost while it had it for itself?"""
        return any(lone.runner_id == runner_id for lone in self.lone_losses)

    def forgive(self, num_tokens: int, lone: LoneLoss | None) -> None:
        """A loss is forgiven to a request that has `num_tokens` now; `lone`: it had been alone there."""
        if num_tokens > self.pardoned_at:
            self.pardons, self.pardoned_at = 0, num_tokens
        if self.pardons == PARDONS:
            return
        self.pardons += 1
        if lone is None:
            self.strikes -= 1
        elif lone in self.lone_losses:
            self.lone_losses.remove(lone)

    @property
    def story(self) -> str:
        """What happened when it was computed alone, as clauses."""
        return ", and ".join(dict.fromkeys(lone.loss.story for lone in self.lone_losses))
