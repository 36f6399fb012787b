"""Strict classes with ageing: a class is worth `ageing_s` seconds, and a higher one takes a lower one's slot.

The order is arrival - priority * ageing_s, which does not change with time. So a request is overtaken only by requests
of higher classes that arrive less than (their class - its class) * ageing_s after it: the bound on starvation.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from scheduler_svc.policy import LedgerView, Policy, PolicyParameters, RequestView, RunningView, WaitingView


class PriorityParameters(PolicyParameters):
    """Parameters of `priority`."""

    ageing_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds of waiting that one class is worth: nobody is overtaken by a request of the next class "
        "that arrives later than this after it.",
    )
    preempt: bool = Field(
        default=True, description="A waiting request takes slot and blocks of running ones of a lower class."
    )


class Priority(Policy):
    """Higher `priority` first (a field of the request, -100 to 100), then first come, first served."""

    name = "priority"
    Parameters = PriorityParameters

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Arrival, moved ahead by the class."""
        return request.arrival_s - request.priority * float(self.parameters.ageing_s)

    def displace(self, running: Sequence[RunningView], candidate: WaitingView) -> RunningView | None:
        """One of the lowest class, if that is below the candidate's."""
        if not self.parameters.preempt:
            return None
        lowest = min((view.request.priority for view in running), default=candidate.request.priority)
        if lowest >= candidate.request.priority:
            return None
        victim: RunningView | None = self.parameters.choose_victim(
            [view for view in running if view.request.priority == lowest]
        )
        return victim
