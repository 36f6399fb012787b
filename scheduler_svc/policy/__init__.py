"""Scheduling policies: the interface for policy authors, the guard around calls, and lookup by name."""

from scheduler_svc.policy.guard import PolicyGuard
from scheduler_svc.policy.interface import Accept, Budget, Policy, PolicyParameters, Refuse, VictimChoice
from scheduler_svc.policy.registry import (
    ENTRY_POINT_GROUP,
    UnknownPolicy,
    WrongParameters,
    available_policies,
    import_policy,
    installed_policies,
    load_policy,
    policy_class,
)
from scheduler_svc.policy.views import (
    Account,
    Ended,
    FirstToken,
    LedgerView,
    Load,
    RequestView,
    RunningView,
    StepReport,
    StepTimes,
    WaitingView,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "Accept",
    "Account",
    "Budget",
    "Ended",
    "FirstToken",
    "LedgerView",
    "Load",
    "Policy",
    "PolicyGuard",
    "PolicyParameters",
    "Refuse",
    "RequestView",
    "RunningView",
    "StepReport",
    "StepTimes",
    "UnknownPolicy",
    "VictimChoice",
    "WaitingView",
    "WrongParameters",
    "available_policies",
    "import_policy",
    "installed_policies",
    "load_policy",
    "policy_class",
]
