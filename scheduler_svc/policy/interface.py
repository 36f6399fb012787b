"""The policy interface: small functions over read-only views. The policy proposes, the core checks and commits.

A policy is one class in one file, found through the entry-point group `roster.policies`. It overrides what it changes;
the defaults here are first come, first served with chunked prefill. The core calls only what is overridden, so an
unused function costs nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduler_svc.policy.views import LedgerView, Load, RequestView, RunningView, StepReport, WaitingView


class _Budget(NamedTuple):
    prefill_tokens: int
    may_chunk: bool = True
    max_new: int = 1 << 30
    admit_ahead: bool = False
    overflow: int = 0


class Budget(_Budget):
    """What a step may do besides decoding.

    prefill_tokens: most prompt positions. may_chunk: a prompt may be split (one longer than a whole step always is).
    max_new: most sequences admitted. admit_ahead: sequences may take slots before the budget reaches them.
    overflow: positions beyond prefill_tokens for a prompt that they complete, as the last of the step. Its former name,
    `stretch`, is still understood, with a warning.
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
        """Of these, `tokens` prompt positions at most, those that complete a prompt among them."""
        prefill_tokens = int(min(self.prefill_tokens, tokens))
        return self._replace(prefill_tokens=prefill_tokens, overflow=int(min(self.overflow, tokens - prefill_tokens)))


@dataclass(slots=True, frozen=True)
class Accept:
    """The request may wait."""


@dataclass(slots=True, frozen=True)
class Refuse:
    """The request is refused at once (RESOURCE_EXHAUSTED). `retry_after_s` goes into RetryInfo; 0 for none."""

    reason: str
    retry_after_s: float = 0.0


class VictimChoice(StrEnum):
    """Which of the sequences that may be preempted is."""

    LOWEST_RANK = "lowest_rank"
    LEAST_COMPUTED = "least_computed"


class PolicyParameters(BaseModel):
    """The parameters that every policy has; a policy with more of them extends this class."""

    model_config = ConfigDict(extra="forbid")

    victim: VictimChoice = Field(
        default=VictimChoice.LOWEST_RANK,
        description="Who is preempted when blocks run out, among those that rank below: the lowest of them, or the "
        "one with the least computed, which wastes least.",
    )
    step_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most positions a step, decoding rows included; default: what the runner allows. It bounds what a "
        "prompt may cost its neighbours; policies that choose budgets of their own may ignore it.",
    )
    finish_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most positions of a step that thereby computes the last of a prompt, so that a short rest needs "
        "no step of its own; default: step_tokens, below which it can't be. Policies that take only whole prompts or "
        "whole batches ignore both.",
    )

    @model_validator(mode="after")
    def _finish_lies_beyond_step(self) -> Self:
        if self.finish_tokens is None:
            return self
        if self.step_tokens is None:
            raise ValueError("finish_tokens says how far a step may exceed step_tokens: set step_tokens too")
        if self.finish_tokens < self.step_tokens:
            raise ValueError(
                f"finish_tokens ({self.finish_tokens}) is below step_tokens ({self.step_tokens}): a step that ends a "
                "prompt may be longer than others, not shorter"
            )
        return self

    def choose_victim(self, running: Sequence[RunningView]) -> RunningView | None:
        """The victim among `running`, any of which may be preempted; None if there is none."""
        if self.victim is VictimChoice.LEAST_COMPUTED:
            return min(running, key=lambda view: (view.computed, _reversed(view)), default=None)
        return max(running, key=lambda view: view.rank, default=None)


def _reversed(view: RunningView) -> int:
    """Of two with as much computed, the later arrival."""
    return -view.rank.own


class Policy:
    """First come, first served; every step up to `step_tokens` positions, prompts in chunks."""

    name: ClassVar[str] = "base"
    Parameters: ClassVar[type[PolicyParameters]] = PolicyParameters
    rerank_window: int = 0
    """How many of the queue's first sequences `rerank` gets; a policy that overrides it sets this (at most 256)."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def admit(self, request: RequestView, load: Load) -> Accept | Refuse:
        """May this request wait at all?"""
        return Accept()

    def key(self, request: RequestView, ledger: LedgerView) -> Any:
        """Time-invariant sort key, a number or a tuple of numbers; smaller goes first."""
        return request.arrival_s

    def tenant_key(self, tenant: str, ledger: LedgerView) -> float:
        """Overridden, it orders tenants: the tenant with the least key goes first, and `key` orders within a tenant.

        It must be a sum of what the tenant was served, which only grows, and its account's `lift`: the core raises the
        lift of a tenant that comes back to the queue, so that it is owed nothing for the time when it asked for
        nothing.
        """
        return ledger.account(tenant).lift

    def budget(self, load: Load) -> Budget:
        """What a step may do besides decoding; by default `rest_of_step`."""
        return self.rest_of_step(load.decoding, load.max_step_tokens)

    def rest_of_step(self, decoding: int, max_step_tokens: int) -> Budget:
        """What the decoding rows leave of the step; at least one position, so that prompts always move."""
        step_tokens = min(self.parameters.step_tokens or max_step_tokens, max_step_tokens)
        prefill_tokens = max(1, step_tokens - decoding)
        finish_tokens = self.parameters.finish_tokens or step_tokens
        return Budget(prefill_tokens, overflow=max(0, finish_tokens - decoding - prefill_tokens))

    def rerank(self, head: Sequence[WaitingView]) -> Sequence[WaitingView]:
        """Overridden, it reorders the first `rerank_window` sequences of the queue for one step, when somebody may be
        seated: for what changes with time or runner and thus can't be a key. Where tenants are ordered they are the
        first one's. Returns all of them, in any order."""
        return head

    def victim(self, running: Sequence[RunningView], candidate: RunningView) -> RunningView | None:
        """Whom to preempt so that running `candidate` gets a block: one of `running`, all of which rank below it."""
        return self.parameters.choose_victim(running)

    def displace(self, running: Sequence[RunningView], candidate: WaitingView) -> RunningView | None:
        """Overridden, whom to preempt so that waiting `candidate` gets a slot or blocks: one of `running`, all of which
        rank below it, or None (the default): it waits until somebody ends."""
        return None

    def observe(self, report: StepReport) -> None:
        """Feeds learners; called once a result."""
