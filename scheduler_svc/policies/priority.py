"""Priority classes with ageing: a class is worth `ageing_s` seconds, and a higher class preempts a lower one.

The order is arrival - priority * ageing_s, which does not change with time. A request is therefore overtaken only by
requests of higher classes that arrive less than (their class - its class) * ageing_s after it, which bounds starvation.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from scheduler_svc.policy import LedgerView, Policy, PolicyParameters, RequestView, RunningView, WaitingView


class PriorityParameters(PolicyParameters):
    ageing_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds of waiting that one class is worth: a request is never overtaken by one of the next class "
        "that arrives more than this after it.",
    )
    preempt: bool = Field(
        default=True, description="Preempt running requests of a lower class when a waiting one needs a slot or blocks."
    )


class Priority(Policy):
    """Higher `priority` first (a field of the request, -100 to 100), then first come, first served."""

    name = "priority"
    Parameters = PriorityParameters

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Returns the arrival, moved earlier by the class."""
        return request.arrival_s - request.priority * float(self.parameters.ageing_s)

    def displace(self, running: Sequence[RunningView], candidate: WaitingView) -> RunningView | None:
        """Returns a running sequence of the lowest class if that is below the candidate's."""
        if not self.parameters.preempt:
            return None
        lowest = min((view.request.priority for view in running), default=candidate.request.priority)
        if lowest >= candidate.request.priority:
            return None
        victim: RunningView | None = self.parameters.choose_victim(
            [view for view in running if view.request.priority == lowest]
        )
        return victim
