"""Calls the policy for the core, checks what it returns, and falls back to the defaults.

If a call raises, returns an invalid value or exceeds the timeout (`Watchdog`), the default policy (`fcfs`) makes that
decision, or no row drafts, and a counter is incremented. No stream fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.policy.draft_rows import DraftRows, are_drafts
from scheduler_svc.policy.interface import Accept, Budget, Policy, PolicyParameters, Refuse
from scheduler_svc.policy.prefix_view import PrefixView
from scheduler_svc.policy.views import (
    LedgerView,
    Load,
    RequestView,
    RunnerView,
    RunningView,
    StepReport,
    WaitingView,
)
from scheduler_svc.policy.watchdog import Watchdog

MAX_RERANK_WINDOW = 256
"""Maximum number of sequences that `rerank` receives, which bounds its time per step."""
_NUMBERS = (int, float)


class PolicyGuard:
    """Wrapper that returns only valid answers. `install` replaces the policy; the counters are kept."""

    def __init__(self, policy: Policy, timeout_s: float | None = None) -> None:
        """Calls that take longer than `timeout_s` are interrupted; None or 0 means no limit."""
        self.failures = 0
        """Decisions made by the defaults because the policy failed."""
        self.last_failure = ""
        self._watchdog = Watchdog(timeout_s) if timeout_s else None
        self._default = _Default(PolicyParameters())
        self.install(policy)

    def install(self, policy: Policy) -> None:
        """Replaces the policy."""
        self.policy = policy
        self.admits = _overrides(policy, "admit")
        self.budgets = _overrides(policy, "budget")
        self.orders_tenants = _overrides(policy, "tenant_key")
        self.displaces = _overrides(policy, "displace")
        self.sets_drafts = _overrides(policy, "drafts")
        self.chooses_decoders = _overrides(policy, "decode_on")
        self.retains = _overrides(policy, "retain")
        self.prefetches = _overrides(policy, "prefetch_s")
        self.observes = _overrides(policy, "observe")
        self.rerank_window = min(policy.rerank_window, MAX_RERANK_WINDOW) if _overrides(policy, "rerank") else 0

    @property
    def overruns(self) -> int:
        """Calls that took longer than the timeout."""
        return self._watchdog.overruns if self._watchdog is not None else 0

    def close(self) -> None:
        """Stops the watchdog's thread."""
        if self._watchdog is not None:
            self._watchdog.close()

    def admit(self, request: RequestView, load: Load) -> Accept | Refuse:
        """Returns Accept or Refuse."""
        return self._call("admit", lambda answer: isinstance(answer, Accept | Refuse), request, load)

    def key(self, request: RequestView, ledger: LedgerView) -> Any:
        """Returns the sort key as a flat tuple of numbers."""
        key = self._call("key", _is_key, request, ledger)
        return key if isinstance(key, tuple) else (key,)

    def tenant_key(self, tenant: str, ledger: LedgerView) -> float:
        """Returns the tenant's sort key, a number that is not NaN."""
        return self._call("tenant_key", _is_number, tenant, ledger)

    def budget(self, load: Load) -> Budget:
        """Returns the step's budget; all its counts are at least 0."""
        return self._call("budget", _is_budget, load)

    def rest_of_step(self, decoding: int, max_step_tokens: int) -> Budget:
        """Returns the budget of a policy that does not override `budget`, without building a `Load`."""
        return self._call("rest_of_step", _is_budget, decoding, max_step_tokens)

    def rerank(self, head: Sequence[WaitingView]) -> Sequence[WaitingView]:
        """Returns a permutation of `head`."""

        def fits(answer: Any) -> bool:
            return len(answer) == len(head) and {id(view) for view in answer} == {id(view) for view in head}

        return self._call("rerank", fits, head)

    def victim(self, running: Sequence[RunningView], candidate: RunningView) -> RunningView | None:
        """Returns a running sequence that ranks strictly below the running candidate, or None."""
        below = [view for view in running if view.rank > candidate.rank]
        return self._call("victim", _one_of(below), below, candidate)

    def displace(self, running: Sequence[RunningView], candidate: WaitingView) -> RunningView | None:
        """Returns a running sequence that ranks strictly below the waiting candidate, or None."""
        below = [view for view in running if view.rank > candidate.rank]
        return self._call("displace", _one_of(below), below, candidate)

    def drafts(self, load: Load, rows: DraftRows) -> npt.NDArray[np.int32]:
        """Returns the drafts of each row, int32 [R], at most `rows.most`; all 0 if the policy fails."""
        most = rows.most
        answer = self._call("drafts", lambda answer: are_drafts(answer, len(most)), load, rows)
        drafts: npt.NDArray[np.int32] = np.minimum(answer, most).astype(np.int32, copy=False)
        return drafts

    def decode_on(self, sequence: RunningView, runners: Sequence[RunnerView]) -> RunnerView | None:
        """Returns one of `runners`, of which there is at least one, or None."""
        return self._call("decode_on", _one_of(runners), sequence, runners)

    def retain(self, prefix: PrefixView, load: Load) -> float:
        """Returns the value of a block of the prefix, a number that is not NaN."""
        return self._call("retain", _is_number, prefix, load)

    def prefetch_s(self, prefix: PrefixView, load: Load) -> float | None:
        """Returns when the prefix should be in the cache again, in seconds from now, or None."""
        return self._call("prefetch_s", lambda answer: answer is None or _is_number(answer), prefix, load)

    def observe(self, report: StepReport) -> None:
        """Passes the report to the policy."""
        self._call("observe", lambda answer: True, report)

    def _call(self, function: str, fits: Callable[[Any], bool], *arguments: Any) -> Any:
        try:
            method = getattr(self.policy, function)
            if self._watchdog is None:
                answer = method(*arguments)
            else:
                answer = self._watchdog.call(function, method, *arguments)
            if fits(answer):
                return answer
            self.last_failure = f"{function}() returned {_shown(answer)}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # including SystemExit: a policy must not end the process
            self.last_failure = f"{function}() raised {_shown(error)}"
        self.failures += 1
        return getattr(self._default, function)(*arguments)


class _Default(Policy):
    """Decides where the policy fails."""

    def drafts(self, load: Load, rows: DraftRows) -> npt.NDArray[np.int32]:
        """Returns 0 for each row: a policy that fails may be what makes steps slow."""
        return np.zeros(len(rows.most), np.int32)


def _shown(answer: object) -> str:
    """Returns a short representation for a log line; the policy's own `__repr__` may raise."""
    try:
        return repr(answer)[:200]
    except Exception:
        return f"a {type(answer).__name__} whose repr() fails"


def _overrides(policy: Policy, function: str) -> bool:
    return getattr(type(policy), function) is not getattr(Policy, function)


def _one_of(views: Sequence[object]) -> Callable[[Any], bool]:
    return lambda answer: answer is None or any(answer is view for view in views)


def _is_number(number: Any) -> bool:
    return isinstance(number, _NUMBERS) and not math.isnan(number)


def _is_key(key: Any) -> bool:
    return all(map(_is_number, key)) and len(key) > 0 if isinstance(key, tuple) else _is_number(key)


def _is_budget(budget: Any) -> bool:
    if not isinstance(budget, Budget):
        return False
    return _is_count(budget.prefill_tokens) and _is_count(budget.max_new) and _is_count(budget.overflow)


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and number >= 0
