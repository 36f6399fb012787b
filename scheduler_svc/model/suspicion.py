"""Suspicion of a request: the losses of runners that it may have caused.

Most losses have other causes, and some prove it. A process that returns unharmed was not crashed by what it ran, and a
runner that loses even the scheduler's own probe is faulty itself. Such losses are discounted. But a request may also
block a runner until it is given up, at each attempt. So a request that makes no progress in between is discounted
`PARDONS` losses, and no more. Rejection does not wait: the loss that rejects a request does so before it is known
whether the process returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.link.runner_events import Loss

STRIKES = 2
"""Losses after which a request runs only in isolation."""
LONE_LOSSES = 2
"""Losses of runners that computed only this request after which it is rejected; on two runners, if there are two."""
PARDONS = 3
"""Losses that are discounted for a request without progress since the first."""


@dataclass(slots=True, frozen=True)
class LoneLoss:
    """The loss of a runner that computed nothing else."""

    runner_id: str
    loss: Loss


@dataclass(slots=True)
class Suspicion:
    """Loss counters of one request."""

    strikes: int = 0
    """Losses of runners that computed its rows together with others."""
    lone_losses: list[LoneLoss] = field(default_factory=list)
    """Losses of runners that computed only this request, in isolation."""
    pardons: int = 0
    """Losses discounted since its last progress."""
    pardoned_at: int = -1
    """Number of its tokens then."""

    @property
    def is_held(self) -> bool:
        """Whether it runs only in isolation."""
        return self.strikes >= STRIKES

    @property
    def is_rejected(self) -> bool:
        """Whether coincidence is no longer the likelier explanation."""
        return len(self.lone_losses) >= LONE_LOSSES

    def failed_on(self, runner_id: str) -> bool:
        """Whether this runner was lost while it computed only this request."""
        return any(lone.runner_id == runner_id for lone in self.lone_losses)

    def forgive(self, num_tokens: int, lone: LoneLoss | None) -> None:
        """Discounts a loss for a request that has `num_tokens` now; `lone`: the loss, if it ran alone there."""
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
        """Causes of the losses while it was computed alone, as clauses."""
        return ", and ".join(dict.fromkeys(lone.loss.story for lone in self.lone_losses))
