"""Earliest deadline first over TTFT targets, with steps short enough for ITL targets and refusal of late requests.

A request's deadline is its arrival plus its TTFT target, or its own deadline if that is earlier. Requests without a
target are ordered as if their target were `best_effort_s` and are never refused. A request with a target is refused on
arrival if its first token would be late, or if accepting it would make the first token of an accepted request late. The
wait is estimated from the prompt tokens ahead of the request and the pace at which runners compute them; the pace comes
from the step-time model and the mean output length, which is learned from results. No request is refused until both
have seen enough of them.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from scheduler_svc.policies.pending_deadlines import Pace, PendingDeadlines
from scheduler_svc.policy import (
    Accept,
    Budget,
    LedgerView,
    Load,
    Policy,
    PolicyParameters,
    Refuse,
    RequestView,
    StepReport,
)

_LEARNING_STEPS = 40
_LEARNING_ENDS = 8
"""Steps and ended requests before which no request is refused: the estimates of pace and lengths need some evidence."""
_KEPT_SHARE = 0.99
"""Share of the steps with prompts that keep a request's ITL target."""
_LONGEST_RETRY_S = 60.0
"""Maximum time to retry: what the queue will be later is not known."""


class DeadlineParameters(PolicyParameters):
    best_effort_s: float = Field(
        default=60.0, ge=0, description="TTFT target by which requests without one are ordered, in seconds."
    )
    refuse: bool = Field(default=True, description="Refuse a request whose TTFT target cannot be met.")
    safety: float = Field(
        default=1.2, gt=0, description="Factor on the estimated wait: above 1 refuses more requests, below 1 fewer."
    )
    min_tokens: int = Field(
        default=64, ge=1, description="Prompt positions that every step may have, even if an ITL target is then missed."
    )


class Deadline(Policy):
    """Earliest TTFT deadline first, refusing requests that cannot meet theirs."""

    name = "deadline"
    Parameters = DeadlineParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._num_steps = 0
        self._pending = PendingDeadlines()
        self._mean_output = 0.0
        self._num_ended = 0

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Returns the time at which the first token is due, in seconds on the engine's clock."""
        return self._due_at(request)

    def admit(self, request: RequestView, load: Load) -> Accept | Refuse:
        """Refuses a request whose first token would be late, or would make an accepted request's first token late."""
        self._pending.expire(load.now_s)
        due_at = self._due_at(request)
        if self.parameters.refuse and request.ttft_target_ms is not None and self._has_learnt:
            pace = self._pace(load)
            late_s = self._pending.wait_s(due_at, request.prompt_tokens, pace) * self.parameters.safety
            late_s -= due_at - load.now_s
            if late_s > 0:
                reason = f"its first token cannot be ready within {request.ttft_target_ms} ms: try again later"
                return Refuse(reason, min(_LONGEST_RETRY_S, max(0.1, late_s)))
            if self._pending.breaks(due_at, request.prompt_tokens, pace, load.now_s):
                reason = (
                    "its prompt would delay the first tokens of accepted requests past their targets: try again later"
                )
                return Refuse(reason, min(_LONGEST_RETRY_S, max(0.1, request.prompt_tokens / pace.tokens_per_s)))
        self._pending.add(request, due_at)
        return Accept()

    def budget(self, load: Load) -> Budget:
        """Returns the largest budget that keeps the tightest ITL target among the decoding sequences."""
        rest = super().budget(load)
        times = load.step_times
        if load.itl_target_s == math.inf or times is None or not times.known:
            return rest
        tokens = load.prefill_tokens_within(times.planned_s(load.itl_target_s, _KEPT_SHARE))
        return rest.within(max(self.parameters.min_tokens, tokens))

    def observe(self, report: StepReport) -> None:
        """Learns output lengths, and removes first tokens that have arrived from the pending ones."""
        self._num_steps += 1
        for first in report.first_tokens:
            self._pending.keep(first.request, self._due_at(first.request))
        for ended in report.ended:
            self._num_ended += 1
            self._mean_output += (ended.generated - self._mean_output) / min(self._num_ended, 100)

    @property
    def _has_learnt(self) -> bool:
        return self._num_steps >= _LEARNING_STEPS and self._num_ended >= _LEARNING_ENDS

    def _due_at(self, request: RequestView) -> float:
        target_s = self.parameters.best_effort_s if request.ttft_target_ms is None else request.ttft_target_ms / 1000
        due_at: float = request.arrival_s + target_s
        return due_at if request.deadline_s is None else min(due_at, request.deadline_s)

    def _pace(self, load: Load) -> Pace:
        """Estimates the pace at this load: a full step's prompt positions per its time, slots per sequence lifetime."""
        one = load.of_one_runner()
        tokens = max(1, self.budget(one).prefill_tokens)
        times = load.step_times
        step_s = decode_s = token_s = 1e-6
        if times is not None:
            step_s, decode_s, token_s = (
                max(1e-6, seconds)
                for seconds in (
                    times.seconds(tokens, one.decoding, one.context),
                    times.seconds(0, one.decoding, one.context),
                    one.row_token_s,
                )
            )
        ends_per_s = max(1, load.running) / max(1.0, self._mean_output) / token_s
        return Pace(tokens / step_s, max(1, load.runners), ends_per_s, load.slots - load.decoding, decode_s)
