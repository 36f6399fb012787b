"""The policy interface: small functions over read-only views. The policy proposes, the core checks and commits.

A policy is one class in one file, found through the entry-point group `roster.policies`. It overrides what it changes;
the defaults here are first come, first served with chunked prefill. `PolicyGuard` stands between: a policy that raises
or returns nonsense costs that decision under the defaults and a counter, never a stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

ENTRY_POINT_GROUP = "roster.policies"


class UnknownPolicy(ValueError):
    """No such policy, or parameters that it does not take; the message lists what exists."""


@dataclass(slots=True, frozen=True)
class RequestView:
    """What a policy may know of a request. Times in seconds on the engine's monotonic clock."""

    request_id: str
    tenant: str
    arrival_s: float
    priority: int
    prompt_tokens: int
    max_tokens: int
    num_choices: int
    deadline_s: float | None = None
    ttft_target_ms: int | None = None
    itl_target_ms: int | None = None


@dataclass(slots=True, frozen=True)
class RunningView:
    """A running sequence, as a candidate for eviction. `rank` orders by key, then arrival; smaller goes first."""

    sequence_id: int
    request: RequestView
    rank: tuple[Any, int]
    computed: int
    generated: int
    blocks: int


@dataclass(slots=True, frozen=True)
class Load:
    """State of one runner (and of the shared queue) when a step is planned."""

    running: int
    decoding: int
    slots: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    blocks: int
    block_size: int
    max_step_tokens: int


@dataclass(slots=True, frozen=True)
class Budget:
    """What a step may do besides decoding.

    prefill_tokens: most prompt positions. may_chunk: a prompt may be split (one longer than a whole step always is).
    max_new: most sequences admitted. admit_ahead: sequences may take slots before the budget reaches them.
    """

    prefill_tokens: int
    may_chunk: bool = True
    max_new: int = 1 << 30
    admit_ahead: bool = False


@dataclass(slots=True, frozen=True)
class Accept:
    """The request may wait."""


@dataclass(slots=True, frozen=True)
class Refuse:
    """The request is refused at once (RESOURCE_EXHAUSTED). `retry_after_s` goes into RetryInfo; 0 for none."""

    reason: str
    retry_after_s: float = 0.0


@dataclass(slots=True)
class Ledger:
    """What the engine knows over time and a policy swap does not reset: tokens charged per tenant, and the clock."""

    now_s: float = 0.0
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens of admitted sequences, by tenant."""
    sampled_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens sampled by sequences that ended, by tenant."""

    def charge_prompt(self, tenant: str, tokens: int) -> None:
        """Adds to the tenant's prompt tokens."""
        self.prompt_tokens[tenant] = self.prompt_tokens.get(tenant, 0) + tokens

    def charge_sampled(self, tenant: str, tokens: int) -> None:
        """Adds to the tenant's sampled tokens."""
        self.sampled_tokens[tenant] = self.sampled_tokens.get(tenant, 0) + tokens


@dataclass(slots=True, frozen=True)
class StepReport:
    """What a result told: for policies that learn."""

    now_s: float
    rows: int
    sampled: int
    round_trip_s: float


class NoParameters(BaseModel):
    """The parameters of a policy that has none."""

    model_config = ConfigDict(extra="forbid")


class Policy:
    """First come, first served; every step up to `max_step_tokens` positions, prompts in chunks."""

    name: ClassVar[str] = "base"
    Parameters: ClassVar[type[BaseModel]] = NoParameters

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def admit(self, request: RequestView, load: Load) -> Accept | Refuse:
        """May this request wait at all?"""
        return Accept()

    def key(self, request: RequestView, ledger: Ledger) -> Any:
        """Time-invariant sort key, a number or a tuple of numbers; smaller goes first."""
        return request.arrival_s

    def budget(self, load: Load) -> Budget:
        """What this step may do."""
        return Budget(prefill_tokens=load.max_step_tokens - load.decoding)

    def victim(self, running: Sequence[RunningView], candidate: RunningView) -> RunningView | None:
        """Whom to preempt so that `candidate` gets a block; must rank strictly below it."""
        worst = max(running, key=lambda view: view.rank, default=None)
        return worst if worst is not None and worst.rank > candidate.rank else None

    def observe(self, report: StepReport) -> None:
        """Feeds learners; called once a result."""


class PolicyGuard:
    """Calls a policy, checks what it returns, and falls back to the defaults where it fails."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.failures = 0
        self.last_failure = ""
        self._default = Policy(NoParameters())

    def admit(self, request: RequestView, load: Load) -> Accept | Refuse:
        """Accept or Refuse, whatever the policy does."""
        return self._call("admit", lambda answer: isinstance(answer, Accept | Refuse), request, load)

    def key(self, request: RequestView, ledger: Ledger) -> Any:
        """A flat tuple of finite numbers, whatever the policy does."""
        key = self._call("key", _is_key, request, ledger)
        return key if isinstance(key, tuple) else (key,)

    def budget(self, load: Load) -> Budget:
        """A budget with prefill_tokens and max_new >= 0, whatever the policy does."""
        return self._call("budget", _is_budget, load)

    def victim(self, running: Sequence[RunningView], candidate: RunningView) -> RunningView | None:
        """A running sequence that ranks strictly below the candidate, or None."""

        def fits(answer: Any) -> bool:
            return answer is None or (any(answer is view for view in running) and answer.rank > candidate.rank)

        return self._call("victim", fits, running, candidate)

    def observe(self, report: StepReport) -> None:
        """Tells the policy; its failures are counted."""
        self._call("observe", lambda answer: True, report)

    def _call(self, function: str, fits: Callable[[Any], bool], *arguments: Any) -> Any:
        try:
            answer = getattr(self.policy, function)(*arguments)
            if fits(answer):
                return answer
            self.last_failure = f"{function}() returned {answer!r}"
        except Exception as error:
            self.last_failure = f"{function}() raised {error!r}"
        self.failures += 1
        return getattr(self._default, function)(*arguments)


def _is_key(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return bool(parts) and all(isinstance(part, int | float) and not math.isnan(part) for part in parts)


def _is_budget(budget: Any) -> bool:
    return isinstance(budget, Budget) and _is_count(budget.prefill_tokens) and _is_count(budget.max_new)


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and number >= 0


def available_policies() -> list[str]:
    """Names of the installed policies, sorted."""
    return sorted(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))


def load_policy(name: str, parameters: dict[str, Any]) -> Policy:
    """Builds the policy of this name. Raises UnknownPolicy with a list of what exists."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            break
    else:
        raise UnknownPolicy(f"there is no policy {name!r}; installed are: {', '.join(available_policies())}")
    policy_class: type[Policy] = entry.load()
    try:
        return policy_class(policy_class.Parameters(**parameters))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        known = ", ".join(policy_class.Parameters.model_fields) or "none"
        raise UnknownPolicy(f"policy {name!r} does not take these parameters: {problems}. It knows: {known}") from error
