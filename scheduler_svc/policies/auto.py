"""The default: steps as long as the time between tokens allows, short prompts first, and the makespan in a deep queue.

*Steps.* While sequences decode, a step may take the ITL target: the service's, or 8 decode steps of one row, or a
tighter target of a decoding request. The runner's step-time model says how many prompt positions fit. A part of the
time is kept for the end of a prompt, which otherwise needs a step of its own. When nothing decodes, one prompt may take
the whole step. Small steps cost little while few prompts wait: on a GPU the prompts themselves take most of their time.
When more than `_BUSY` steps of prompts wait, every step takes all of its time, because the overhead of each step adds
to the wait of all.

*Order.* A prompt is ranked as if it had arrived later, by `patience` times its own computing time, so short ones hardly
wait for long ones, and none waits longer than in proportion to its length.

*A deep queue*, of more than `_DEEP` steps of prompts, is a batch that came at once, or an overload: the first token is
far away, and throughput counts. Requests with long outputs then go first (as in `ljf`), so that none is left to decode
alone at the end. Prompts get at least as much time as the decoding rows, and steps are large enough to be worth their
overhead, whatever the target says. What the queue holds is compared with the present budget: one that has shrunk for
whatever reason grows again.
"""

from __future__ import annotations

import math

from pydantic import Field

from scheduler_svc.policy import Budget, LedgerView, Load, Policy, PolicyParameters, RequestView, StepTimes

_DEFAULT_ROW_STEPS = 8
"""Decode steps of one row in the default target: with 4 ms a row, as for an 8B model on an H200, the 32 ms of
steps of 1,024 tokens, a usual choice there."""
_LONGEST_DEFAULT_S = 0.035
"""Of the default target, on a GPU: text still appears faster than it can be read, however large the model is."""
_SHORTEST_DEFAULT_S = 0.005
"""Of the default target: smaller steps of a small model are mostly launch and link."""
_LEAST_ROW_STEPS = 2
"""A default target is at least this many decode steps of one row, however slow they are."""
_UNHURRIED = 0.75
"""Share of the target that prompts fill which do not end in the step. Of 0.75, 0.85 and 1 it had the lowest median TTFT
in the simulator (8B shape, 14 and 18 requests a second), at 10% more of p99."""
_BUSY = 5
"""Steps of prompts that wait or are under way, from which prompts fill all of the target. In the same
simulations, 2 raised the median TTFT as always filling it does; 4 to 6 did not, and had nearly as low a p99."""
_SLOW_SHARE = 0.008
"""Share of all steps that may miss the target: the 99th percentile of the gaps keeps it, with a fifth to spare."""
_MOST_SLOW = 0.15
"""Of the steps with prompts, if they are few."""
_DEEP = 32
"""Steps of prompts from which a queue is deep: about a second with the longest default target, so that few of
its first tokens can come soon."""
_DEEP_SPARSE = 8
"""The same in a mixture of experts, whose steps in a deep queue take about as long as four of its default targets."""
_LEAST_PROMPT_SHARE = 1.0
"""Time for prompts, relative to that of the decoding rows, which prompts get even if the target is then missed."""
_WORTHWHILE = 12
"""In a deep queue, a step is at least this many times its overhead, which then takes less than a tenth: in the
simulator, the 0.6B shape had the batch at once done soonest."""
_UNKNOWN_TOKENS = 512
"""Prompt positions per step while the step times are unknown: the default step of a CPU runner."""
_LONGEST_OUTPUT = math.log1p(32_768)
"""Logarithm of the output from which a deep queue ranks all longer ones alike."""


class AutoParameters(PolicyParameters):
    itl_target_ms: float | None = Field(
        default=None,
        ge=0,
        description="Inter-token time that the 99th percentile keeps, in milliseconds; 0: none, throughput alone "
        "counts. Default: the scheduler's setting of this name, otherwise 8 decode steps of one row, 5 to 35 ms on a "
        "GPU.",
    )
    min_tokens: int = Field(
        default=64, ge=1, description="Prompt positions that every step may have, even if the target is then missed."
    )
    patience: float = Field(
        default=2.5,
        ge=0,
        description="A prompt is ranked as if it had arrived later, by this many times its own computing time; 0: "
        "order of arrival.",
    )
    ageing_s: float = Field(
        default=6.0,
        ge=0,
        description="Seconds by which a deep queue may delay a short output behind long ones.",
    )


class Auto(Policy):
    """Steps that keep the time between tokens, short prompts first, and throughput in a deep queue."""

    name = "auto"
    Parameters = AutoParameters

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Returns the arrival, moved later by the prompt's computing time, or in a deep queue for a short output."""
        times, arrival_s = ledger.step_times, request.arrival_s
        if times is None or not times.known:
            return arrival_s
        position_s = times.position_s
        waiting = ledger.waiting_tokens / max(1, ledger.runners)
        if times.is_sparse:
            is_deep = waiting > _DEEP_SPARSE * times.efficient_prefill
        else:
            is_deep = waiting * position_s > _DEEP * self._target_s(ledger.itl_target_s, times)
        if is_deep:
            output = min(1.0, math.log1p(request.max_tokens) / _LONGEST_OUTPUT)
            return arrival_s + float(self.parameters.ageing_s) * (1 - output)
        return arrival_s + float(self.parameters.patience) * request.prompt_tokens * position_s

    def budget(self, load: Load) -> Budget:
        """Returns the prompt positions with which the step keeps the target, some of them for the end of a prompt."""
        rest = self.rest_of_step(load.decoding, load.max_step_tokens)
        times = load.step_times
        if times is None or not times.known:
            return rest.within(_UNKNOWN_TOKENS)
        target_s = self._target_s(load.service_itl_target_s, times)
        if not target_s:
            return rest
        target_s = min(target_s, load.itl_target_s)
        slow_share = min(_MOST_SLOW, round(_SLOW_SHARE / max(_SLOW_SHARE, times.prompt_share), 2))
        step_s = times.planned_s(target_s, 1 - slow_share)
        tokens = self._within(step_s, load)
        pending = load.waiting_tokens / load.queue_runners + load.prompt_backlog
        if pending > _DEEP * tokens:
            return self._deep_budget(step_s, load, times, rest)
        decode_s = times.seconds(0, load.decoding, load.context) if load.decoding else 0.0
        if decode_s >= step_s:
            step_s = (1 + _LEAST_PROMPT_SHARE) * decode_s
            tokens = self._within(step_s, load)
        most = rest.prefill_tokens + rest.overflow
        share = 1.0 if pending > _BUSY * tokens else _UNHURRIED
        usual = min(rest.prefill_tokens, self._within(step_s * share, load))
        return Budget(usual, overflow=max(0, (min(most, tokens) if load.decoding else most) - usual))

    def _deep_budget(self, step_s: float, load: Load, times: StepTimes, rest: Budget) -> Budget:
        """Returns the budget where the queue is deep: whatever the target says, steps are large enough to be worth
        their overhead, and prompts get at least as much time as decoding rows.

        In a mixture of experts most of a step's overhead are the experts' weights, which no size of step makes small.
        """
        if not load.decoding:
            return rest
        if times.is_sparse:
            return rest.within(max(self.parameters.min_tokens, times.efficient_prefill - load.decoding))
        decode_s = times.seconds(0, load.decoding, load.context)
        step_s = max(step_s, _WORTHWHILE * times.overhead_s, (1 + _LEAST_PROMPT_SHARE) * decode_s)
        tokens = max(self._within(step_s, load), times.efficient_prefill - load.decoding)
        return rest.within(tokens)

    def _within(self, step_s: float, load: Load) -> int:
        """Returns the prompt positions of a step of `step_s` seconds, at least `min_tokens`."""
        return int(max(self.parameters.min_tokens, load.prefill_tokens_within(step_s)))

    def _target_s(self, setting_s: float | None, times: StepTimes) -> float:
        """Returns the service's ITL target in seconds; 0 if there is none."""
        own_ms = self.parameters.itl_target_ms
        if own_ms is not None:
            return float(own_ms) / 1000
        if setting_s is not None:
            return setting_s
        row_s = times.row_s
        longest_s = max(_LONGEST_DEFAULT_S, _LEAST_ROW_STEPS * row_s) if times.on_gpu else math.inf
        return max(_SHORTEST_DEFAULT_S, min(_DEFAULT_ROW_STEPS * row_s, longest_s))
