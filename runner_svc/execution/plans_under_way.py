"""The plans that an executor has launched: their masks go to them, their results come out in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.jobs import ExecutePlan, TakeMasks, fault_of
from runner_svc.execution.launched_plan import LaunchedPlan
from runner_svc.execution.runner import Runner


@dataclass(slots=True)
class _Launched:
    """A plan, the message that its result goes into, and since when it has had all that it needs."""

    message: plan_pb2.ToScheduler
    plan: LaunchedPlan
    began_at: float = field(default_factory=time.monotonic)


class PlansUnderWay:
    """Those of the current session, the oldest first; belongs to the thread that calls the runner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans: deque[_Launched] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def oldest_awaits_masks(self) -> bool:
        """Nothing comes out before the scheduler's next word."""
        return bool(self._plans) and self._plans[0].plan.awaits_masks

    @property
    def oldest_began_at(self) -> float | None:
        """When (`time.monotonic`) the oldest plan began to compute; None while it waits for masks, or there is none."""
        return self._plans[0].began_at if self._plans and not self.oldest_awaits_masks else None

    @property
    def oldest_done(self) -> bool:
        """`take_result` would return at once."""
        return bool(self._plans) and self._plans[0].plan.done()

    def launch(self, job: ExecutePlan) -> None:
        """Starts the plan. Raises PlanFault."""
        message = plan_pb2.ToScheduler(session=job.session, number=job.number)
        self._plans.append(_Launched(message, self._runner.launch(job.number, job.plan)))

    def hand_masks(self, job: TakeMasks) -> None:
        """Hands masks to their plan; those for a plan that is not under way are dropped. Raises PlanFault."""
        for launched in self._plans:
            if (launched.message.session, launched.message.number) == (job.session, job.number):
                launched.began_at = time.monotonic()
                launched.plan.mask(job.masks)

    def take_result(self) -> plan_pb2.ToScheduler:
        """Waits for the oldest plan, which must not await masks; its result, or its fault."""
        launched = self._plans.popleft()
        message = launched.message
        try:
            message.result.CopyFrom(launched.plan.wait())
        except Exception as error:
            return fault_of(message.session, error)
        return message

    def finish_all(self) -> Iterator[plan_pb2.ToScheduler]:
        """Waits for the plans, their results or faults; abandons those from the first on that awaits masks."""
        while self._plans and not self.oldest_awaits_masks:
            yield self.take_result()
        while self._plans:
            with suppress(PlanFault):
                self._plans.popleft().plan.abandon()
