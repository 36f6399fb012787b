"""Stands between the core and a policy: calls it, checks what it returns, and falls back to the defaults.

A policy that raises or returns nonsense costs that decision under the defaults (`fcfs`) and a counter, never a stream.
So does one that takes too long, where there is a timeout: see `Watchdog`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from scheduler_svc.policy.interface import Accept, Budget, Policy, PolicyParameters, Refuse
from scheduler_svc.policy.views import LedgerView, Load, RequestView, RunningView, StepReport, WaitingView
from scheduler_svc.policy.watchdog import Watchdog

MAX_RERANK_WINDOW = 256
_NUMBERS = (int, float)


class PolicyGuard:
    """The policy as the core sees it: every answer fits. The policy may be replaced; the counters stay."""

    def __init__(self, policy: Policy, timeout_s: float | None = None) -> None:
        """`timeout_s`: a call that takes longer is interrupted; None: calls may take any time."""
        self.failures = 0
        """Decisions that the defaults took in the policy's place."""
        self.last_failure = ""
        self._watchdog = Watchdog(timeout_s) if timeout_s else None
        self._default = Policy(PolicyParameters())
        self.install(policy)

    def install(self, policy: Policy) -> None:
        """From now on `policy` decides."""
        self.policy = policy
        self.admits = _overrides(policy, "admit")
        self.budgets = _overrides(policy, "budget")
        self.orders_tenants = _overrides(policy, "tenant_key")
        self.displaces = _overrides(policy, "displace")
        self.observes = _overrides(policy, "observe")
        self.rerank_window = min(policy.rerank_window, MAX_RERANK_WINDOW) if _overrides(policy, "rerank") else 0

    @property
    def overruns(self) -> int:
        """Calls that took longer than the timeout."""
        return self._watchdog.overruns if self._watchdog is not None else 0

    def close(self) -> None:
        """Ends the watchdog's thread."""
        if self._watchdog is not None:
            self._watchdog.close()

    def admit(self, request: RequestView, load: Load) -> Accept | Refuse:
        """Accept or Refuse, whatever the policy does."""
        return self._call("admit", lambda answer: isinstance(answer, Accept | Refuse), request, load)

    def key(self, request: RequestView, ledger: LedgerView) -> Any:
        """A flat tuple of numbers, whatever the policy does."""
        key = self._call("key", _is_key, request, ledger)
        return key if isinstance(key, tuple) else (key,)

    def tenant_key(self, tenant: str, ledger: LedgerView) -> float:
        """A number, whatever the policy does."""
        return self._call("tenant_key", _is_number, tenant, ledger)

    def budget(self, load: Load) -> Budget:
        """A budget of counts >= 0, whatever the policy does."""
        return self._call("budget", _is_budget, load)

    def rest_of_step(self, decoding: int, max_step_tokens: int) -> Budget:
        """The budget of a policy that does not override `budget`: so there is no load to be made up."""
        return self._call("rest_of_step", _is_budget, decoding, max_step_tokens)

    def rerank(self, head: Sequence[WaitingView]) -> Sequence[WaitingView]:
        """The views of `head`, each once, whatever the policy does."""

        def fits(answer: Any) -> bool:
            return len(answer) == len(head) and {id(view) for view in answer} == {id(view) for view in head}

        return self._call("rerank", fits, head)

    def victim(self, running: Sequence[RunningView], candidate: RunningView) -> RunningView | None:
        """A running sequence that ranks strictly below the candidate, or None."""
        below = [view for view in running if view.rank > candidate.rank]
        return self._call("victim", _one_of(below), below, candidate)

    def displace(self, running: Sequence[RunningView], candidate: WaitingView) -> RunningView | None:
        """A running sequence that ranks strictly below the candidate, or None."""
        below = [view for view in running if view.rank > candidate.rank]
        return self._call("displace", _one_of(below), below, candidate)

    def observe(self, report: StepReport) -> None:
        """Tells the policy; its failures are counted."""
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
        except BaseException as error:  # a policy that calls sys.exit() is a failing policy, no reason to end
            self.last_failure = f"{function}() raised {_shown(error)}"
        self.failures += 1
        return getattr(self._default, function)(*arguments)


def _shown(answer: object) -> str:
    """What the policy gave, for a log line."""
    try:
        return repr(answer)[:200]
    except Exception:
        return f"a {type(answer).__name__} that can't be shown"


def _overrides(policy: Policy, function: str) -> bool:
    return getattr(type(policy), function) is not getattr(Policy, function)


def _one_of(views: Sequence[RunningView]) -> Callable[[Any], bool]:
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
