"""The policy interface: small functions over read-only views. The policy proposes; the core checks and commits.

A policy is one class in one file, found through the entry-point group `roster.policies`. It overrides only what it
changes; the defaults are first come, first served with chunked prefill. The core calls only overridden functions, so an
unused one costs nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduler_svc.policy.draft_rows import DraftRows, Drafts
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


class _Budget(NamedTuple):
    prefill_tokens: int
    may_chunk: bool = True
    max_new: int = 1 << 30
    admit_ahead: bool = False
    overflow: int = 0


class Budget(_Budget):
    """Budget of a step for everything besides decoding.

    prefill_tokens: maximum number of prompt positions. may_chunk: whether prompts may be split (a prompt longer than a
    whole step always is). max_new: maximum number of sequences admitted. admit_ahead: whether sequences may take slots
    before the budget reaches them. overflow: positions beyond prefill_tokens that may be used to complete a prompt, the
    step's last.
    `stretch`, the former name of overflow, is accepted with a FutureWarning.
    """

    __slots__ = ()

    def __new__(
        cls,
        prefill_tokens: int,
        may_chunk: bool = True,
        max_new: int = 1 << 30,
        admit_ahead: bool = False,
        overflow: int = 0,
        *,
        stretch: int | None = None,
    ) -> Self:
        if stretch is not None:
            warnings.warn("Budget(stretch=...) is now called overflow", FutureWarning, stacklevel=2)
            overflow = stretch
        return tuple.__new__(cls, (prefill_tokens, may_chunk, max_new, admit_ahead, overflow))

    @property
    def stretch(self) -> int:
        """The former name of `overflow`."""
        warnings.warn("Budget.stretch is now called overflow", FutureWarning, stacklevel=2)
        return self.overflow

    def within(self, tokens: float) -> Budget:
        """Returns this budget limited to `tokens` prompt positions, overflow included."""
        prefill_tokens = int(min(self.prefill_tokens, tokens))
        return self._replace(prefill_tokens=prefill_tokens, overflow=int(min(self.overflow, tokens - prefill_tokens)))


@dataclass(slots=True, frozen=True)
class Accept:
    """Answer of `Policy.admit`: the request may wait."""


@dataclass(slots=True, frozen=True)
class Refuse:
    """Answer of `Policy.admit`: the request is refused at once with RESOURCE_EXHAUSTED.

    `retry_after_s` (seconds) is sent as RetryInfo; 0 for none.
    """

    reason: str
    retry_after_s: float = 0.0


class VictimChoice(StrEnum):
    """Rule that selects a sequence to preempt."""

    LOWEST_RANK = "lowest_rank"
    LEAST_COMPUTED = "least_computed"


class PolicyParameters(BaseModel):
    """Parameters common to all policies. A policy with its own parameters extends this class."""

    model_config = ConfigDict(extra="forbid")

    victim: VictimChoice = Field(
        default=VictimChoice.LOWEST_RANK,
        description="Which lower-ranked sequence is preempted when blocks run out: the one of lowest rank, or the one "
        "with the fewest computed positions, which wastes the least work.",
    )
    step_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of positions per step, decoding rows included; default: the runner's limit. It "
        "bounds how much a prompt slows down other sequences. Policies that choose their own budgets may ignore it.",
    )
    finish_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of positions of a step that completes a prompt, so that a short rest needs no step "
        "of its own; at least step_tokens, which is the default. Policies that take only whole prompts or whole "
        "batches ignore both.",
    )

    @model_validator(mode="after")
    def _finish_lies_beyond_step(self) -> Self:
        if self.finish_tokens is None:
            return self
        if self.step_tokens is None:
            raise ValueError("finish_tokens is set without step_tokens: set step_tokens too")
        if self.finish_tokens < self.step_tokens:
            raise ValueError(
                f"finish_tokens ({self.finish_tokens}) is below step_tokens ({self.step_tokens}): set it to at least "
                "step_tokens"
            )
        return self

    def choose_victim(self, running: Sequence[RunningView]) -> RunningView | None:
        """Returns the victim among `running`, all of which may be preempted, or None if it is empty."""
        if self.victim is VictimChoice.LEAST_COMPUTED:
            return min(running, key=lambda view: (view.computed, _reversed(view)), default=None)
        return max(running, key=lambda view: view.rank, default=None)


def _reversed(view: RunningView) -> int:
    """Returns a key that puts the later arrival first among sequences with equal computed positions."""
    return -view.rank.own


class Policy:
    """First come, first served; each step has up to `step_tokens` positions, with prompts in chunks."""

    name: ClassVar[str] = "base"
    Parameters: ClassVar[type[PolicyParameters]] = PolicyParameters
    rerank_window: int = 0
    """Number of sequences at the head of the queue that `rerank` receives, at most 256; a policy that overrides
    `rerank` sets it."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def admit(self, request: RequestView, load: Load) -> Accept | Refuse:
        """Decides whether the request may wait."""
        return Accept()

    def key(self, request: RequestView, ledger: LedgerView) -> Any:
        """Returns the sort key, a number or a tuple of numbers; smaller goes first. It must not change with time."""
        return request.arrival_s

    def tenant_key(self, tenant: str, ledger: LedgerView) -> float:
        """If overridden, orders tenants: the tenant with the smallest key goes first, and `key` orders within a tenant.

        The key must be the sum of the tenant's service, which only grows, and its account's `lift`. The core raises the
        lift of a tenant that returns to the queue, so that idle time earns no credit.
        """
        return ledger.account(tenant).lift

    def budget(self, load: Load) -> Budget:
        """Returns the step's budget for everything besides decoding; `rest_of_step` by default."""
        return self.rest_of_step(load.decoding, load.max_step_tokens)

    def rest_of_step(self, decoding: int, max_step_tokens: int) -> Budget:
        """Returns the positions that decoding rows leave in the step, at least one so that prompts always progress."""
        step_tokens = min(self.parameters.step_tokens or max_step_tokens, max_step_tokens)
        prefill_tokens = max(1, step_tokens - decoding)
        finish_tokens = self.parameters.finish_tokens or step_tokens
        return Budget(prefill_tokens, overflow=max(0, finish_tokens - decoding - prefill_tokens))

    def rerank(self, head: Sequence[WaitingView]) -> Sequence[WaitingView]:
        """If overridden, reorders the first `rerank_window` sequences of the queue for one step.

        It is called when a sequence may be admitted, and suits criteria that change with time or differ between
        runners, which `key` cannot use. If the policy orders tenants, the sequences are those of the first tenant.
        Returns all of `head`, in any order.
        """
        return head

    def victim(self, running: Sequence[RunningView], candidate: RunningView) -> RunningView | None:
        """Selects a sequence to preempt so that the running `candidate` gets a block. All of `running` rank below the
        candidate."""
        return self.parameters.choose_victim(running)

    def displace(self, running: Sequence[RunningView], candidate: WaitingView) -> RunningView | None:
        """If overridden, selects a sequence to preempt so that the waiting `candidate` gets a slot or blocks. All of
        `running` rank below the candidate. If it returns None, the default, the candidate waits."""
        return None

    def drafts(self, load: Load, rows: DraftRows) -> Drafts:
        """Returns how many tokens each row drafts in a step of decoding rows; `rows.best(load)` by default.

        It is called for steps of a runner that has a drafter, without parts of prompts. What it returns never changes a
        text, only its pace. Numbers above `rows.most` are cut to it, and where no free blocks are left.
        """
        return rows.best(load)

    def decode_on(self, sequence: RunningView, runners: Sequence[RunnerView]) -> RunnerView | None:
        """If overridden, selects where a sequence decodes that a runner with the role `prefill` computes: one of
        `runners`, at least one, which have room for it now, or None: where it is, until the policy is asked again.

        By default the runner for decoding with most slots left, or, if none has room, one for both.
        """
        return max(runners, key=lambda runner: (runner.role == "decode", runner.free_slots))

    def retain(self, prefix: PrefixView, load: Load) -> float:
        """If overridden, returns the value of keeping a block of the prefix in the cache; the least valuable one is
        evicted first, and among equals the least recently used, as by default.

        It is called when blocks of the prefix become evictable, when they are about to be evicted, and now and then in
        between. It may change with time. A block is never evicted before its continuations, whatever their values.
        """
        return 0.0

    def prefetch_s(self, prefix: PrefixView, load: Load) -> float | None:
        """If overridden, returns when the prefix should be in the cache again, in seconds from now, if parts of it were
        moved to the runner's host pool meanwhile; None, the default: when a request needs it. Called when a request of
        the prefix has ended."""
        return None

    def observe(self, report: StepReport) -> None:
        """Receives the report of each result, for policies that learn."""
