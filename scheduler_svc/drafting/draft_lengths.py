"""How many tokens each decoding row of a step drafts: asks the policy, within what the sequences allow."""

from __future__ import annotations

from collections.abc import Callable

from roster_protos import plan_pb2
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.plan.slot_table import IntColumn, SlotTable
from scheduler_svc.policy import Load, PolicyGuard, RequestView
from scheduler_svc.step_times.step_time_model import StepTimeModel


class Drafting:
    """Decides the lengths of the drafts of one runner, which has a drafter."""

    def __init__(
        self,
        hello: plan_pb2.Hello,
        table: SlotTable,
        step_times: StepTimeModel,
        view_of: Callable[[Sequence], RequestView],
        most_tokens: int,
    ) -> None:
        self.max_drafts = hello.max_drafts
        """Most tokens that a row may draft."""

    def wants(self, last_plan: int, policy: PolicyGuard) -> bool:
        """Returns whether the plan after this one may draft; if not, it may follow from the last one."""
        return False

    def lengths(
        self, decode: IntColumn, last_plan: int, load: Callable[[], Load], policy: PolicyGuard
    ) -> Column | None:
        """Returns how many tokens each of the slots `decode` drafts, int32 [R], or None if none does."""
        return None

    def applied(self, applied: AppliedResult) -> None:
        """Learns from the result of a plan that drafted; sequences that ended are still in their slots."""
