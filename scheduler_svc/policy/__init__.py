"""Scheduling policies: the interface for policy authors, the guard around calls, and lookup by name."""

from scheduler_svc.policy.draft_rows import DraftRows, Drafts
from scheduler_svc.policy.guard import PolicyGuard
from scheduler_svc.policy.interface import Accept, Budget, Policy, PolicyParameters, Refuse, VictimChoice
from scheduler_svc.policy.policy_files import UnknownPolicy, class_in_file, file_in, files_of
from scheduler_svc.policy.prefix_view import Gaps, PrefixView, Returns
from scheduler_svc.policy.registry import (
    ENTRY_POINT_GROUP,
    RETENTIONS,
    WrongParameters,
    available_policies,
    create_policy,
    import_policy,
    load_policy,
    load_retention,
    permitted_policy_class,
    permitted_retention,
    policy_class,
)
from scheduler_svc.policy.views import (
    Account,
    Ended,
    FirstToken,
    LedgerView,
    Load,
    RequestView,
    RunnerView,
    RunningView,
    StepReport,
    StepTimes,
    WaitingView,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "RETENTIONS",
    "Accept",
    "Account",
    "Budget",
    "DraftRows",
    "Drafts",
    "Ended",
    "FirstToken",
    "Gaps",
    "LedgerView",
    "Load",
    "Policy",
    "PolicyGuard",
    "PolicyParameters",
    "PrefixView",
    "Refuse",
    "RequestView",
    "Returns",
    "RunnerView",
    "RunningView",
    "StepReport",
    "StepTimes",
    "UnknownPolicy",
    "VictimChoice",
    "WaitingView",
    "WrongParameters",
    "available_policies",
    "class_in_file",
    "create_policy",
    "file_in",
    "files_of",
    "import_policy",
    "load_policy",
    "load_retention",
    "permitted_policy_class",
    "permitted_retention",
    "policy_class",
]
