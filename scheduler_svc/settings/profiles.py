"""Profiles: one setting that decides when plans are made, how the engine waits, and when tokens are sent.

| profile | next plan | plans in flight | engine polls | messages merge |
|---|---|---|---|---|
| `latency` | held back, 6% late | 2, 3 if steps are short | 1 ms around a result | above 85% of a core |
| `balanced` | held back, 3% late | 2, 3 if steps are short | near a result | above 60% of a core |
| `throughput` | at once | 2, 3 if steps are short | near a result | above a fixed rate |
| `quiet` | at once | 2 | never | above a fixed rate |

The times themselves adapt to what is measured: `PlanLead` (scheduler_svc/plan/plan_lead.py), `EngineWait`
(scheduler_svc/engine/engine_wait.py) and `MessagePacer` (scheduler_svc/front/rpc/pacing.py). A setting that is given,
such as `depth`, overrides the profile.
"""

from __future__ import annotations

from dataclasses import dataclass

from roster_common.profile_names import ProfileName


@dataclass(frozen=True, slots=True)
class PollWindow:
    """When the engine polls instead of sleeping, around the time at which a result is predicted."""

    before_s: float
    """Seconds before it."""
    after_s: float
    """Seconds after it."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile sets."""

    late_share: float | None
    """Share of the plans that may reach a runner after it has run out of work; None: plans are not held back."""
    most_depth: int
    """Maximum number of plans in flight per runner; those beyond two only where a runner would run out of work."""
    poll: PollWindow | None
    """None: the engine never polls."""
    front_load: float | None
    """Share of a core above which a front worker merges messages, where cores are free; None: it merges above a fixed
    rate."""


PROFILES: dict[ProfileName, Profile] = {
    "latency": Profile(1 / 16, 3, PollWindow(0.001, 0.001), 0.85),
    "balanced": Profile(1 / 32, 3, PollWindow(0.0002, 0.0005), 0.6),
    "throughput": Profile(None, 3, PollWindow(0.0002, 0.0005), None),
    "quiet": Profile(None, 2, None, None),
}
