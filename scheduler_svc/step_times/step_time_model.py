"""Model of one runner's step times, seeded by what the runner measured at start and corrected by its steps.

    seconds = w0 + w1 * has prompts + w2 * charged positions + w3 * decoding rows + w4 * context + w5 * prompt pairs

All w >= 0. *Charged positions* are those of the step, rounded up to whole tiles; *context* are the KV positions before
the decoding rows; *prompt pairs* are the (query, key) pairs of prompt chunks, the quadratic term of long prompts. The
weights come from least squares on relative errors. Decode steps and steps with prompts fade separately, so that an hour
without prompts leaves what is known about them. The measured seed never fades, but its times are multiplied by the
ratio of the observed steps to it: a machine may be busier, or a card hotter, than at the start.

A step's time is the runner's own (`Timings`) where its results have it. By how much the steps take longer as the
scheduler sees them is a distribution of its own (`ErrorTail`), which includes launch, link and the scheduler's delays.
Steps that verify drafts have a model of their own on top of this one (`VerifyTimes`) and never change these weights.
Observations are only noted when results arrive, and used when a policy asks: one that does not pays nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import numpy as np

from roster_protos import plan_pb2
from scheduler_svc.step_times.error_tail import ErrorTail
from scheduler_svc.step_times.least_squares import RunningSums, solve
from scheduler_svc.step_times.recent_steps import RecentSteps
from scheduler_svc.step_times.verify_times import VerifyTimes

_SCALE = (1.0, 1.0, 1e-3, 1e-2, 1e-5, 1e-6)
"""Factors that scale the inputs to about 1."""
_REFIT_EVERY = 8
"""Observations between two fits: a fit takes some 0.1 ms in Python, a note a few microseconds."""
_MEMORY = 500.0
"""Observations after which one weighs about a third: half a minute to minutes of load, in which a card's clock and the
lengths of requests change."""
_SEED_WEIGHT = 2
"""Observed steps that one measured step outweighs."""
_DECODE_SAMPLE, _MIXED_SAMPLE = 16, 2
"""One of this many decode steps, and steps with prompts, is observed; all with prompts until the model predicts."""
_SEED_SHARE = 0.5
"""Weight of the measured steps, relative to that of the observed ones. A service whose steps are all alike says nothing
about others, and a budget from such a fit would keep them alike."""
_DRIFTS = (0.25, 4.0)
"""Bounds of one observation's ratio to the measured step, so that an outage does not count as a slow machine."""
_MOST_DELAY = 0.2
"""Share of a target that delays may take: a delay that does not depend on the step's size is not avoided by smaller
steps, which only take longer in all."""
_EFFICIENT = 1.15
"""Time per position, relative to the least measured one, from which on a prompt's chunk is large enough."""
_SPARSE_EFFICIENT = 2048
"""Efficient positions of a mixture of experts on a GPU. Larger steps take less for each position, up to 8,192 and more,
but rows that decode wait: of 1,024 to 8,192, the trace's 512 conversations at once were done soonest with 2,048
(30B-A3B, simulated)."""
_UNMEASURED_EFFICIENT = 512
"""The same without measured steps: a GPU's products are efficient from about 512 rows."""
_DRIFT_MEMORY = 50
"""Observations over which the ratio of observed to measured steps is averaged."""
_SHARE_MEMORY = 256
"""Steps over which the share of those with prompts is averaged."""
_MOST_NOTED = 64
"""Steps kept until a policy asks; the oldest are dropped, so that one that never asks costs no memory."""
_KNOWN_AFTER = 24
"""Observations after which a model without a seed predicts."""
_USUAL_CONTEXT = 256
"""Context of the row in `row_s`, as the runner measures it."""

Inputs = tuple[float, float, float, float, float, float]


class StepTimeModel:
    """Step times of one runner. Policies read it as `StepTimes`."""

    def __init__(
        self,
        tile_tokens: int = 1,
        on_gpu: bool = False,
        costs: Sequence[plan_pb2.StepCost] = (),
        max_drafts: int = 0,
        has_experts: bool = False,
    ) -> None:
        """`costs`: steps that the runner measured at start. `tile_tokens`, `max_drafts`, `has_experts`: as in Hello."""
        self.on_gpu = on_gpu
        self._largest_prefill = 0  # prompt positions of one step, measured or observed
        self._tile = max(1, tile_tokens)
        self._decode, self._mixed = RunningSums(len(_SCALE), _MEMORY), RunningSums(len(_SCALE), _MEMORY)
        self._seed = RunningSums(len(_SCALE), math.inf)
        self._tail = ErrorTail()
        self.prompt_share = 0.1
        """Share of the recent steps that had prompts."""
        self._weights = self._seed_weights = [0.0] * len(_SCALE)
        self._drift = 1.0
        self._noted: deque[tuple[Any, Any, int, float, float]] = deque(maxlen=_MOST_NOTED)
        self._decode_ticks = self._mixed_ticks = self._fitted = 0
        self._delay: tuple[float, float] | None = None  # the last share and its delay
        self.recent = RecentSteps()
        """Times of the last steps as the scheduler saw them, without the runner's waits for late plans."""
        self._measured_row_s = 0.0
        self.efficient_prefill = _UNMEASURED_EFFICIENT
        """Prompt positions of a step from which larger ones save little time per position."""
        self.is_sparse = on_gpu and has_experts
        """Whether steps of more rows read more weights. Measured steps would not tell: their rows have one context, and
        so go to much the same experts."""
        self.on_fit: Callable[[], None] = lambda: None
        """Called when the model has been fitted to further steps."""
        self.verifying = VerifyTimes(self._decode_s, self._position_s, on_gpu, costs, max_drafts)
        """Times of decode steps with and without drafts, of a runner with a drafter."""
        self._first_weights: list[float] = []
        self._has_drafter = max_drafts > 0
        self._seed_with([cost for cost in costs if not cost.drafts])

    @classmethod
    def of(cls, hello: plan_pb2.Hello) -> StepTimeModel:
        """Returns the model of the runner that `hello` describes."""
        on_gpu = hello.device.startswith("cuda")
        return cls(hello.tile_tokens, on_gpu, hello.step_costs, hello.max_drafts, hello.has_experts)

    def _seed_with(self, costs: Sequence[plan_pb2.StepCost]) -> None:
        for cost in costs:
            seconds, prompt, start = cost.step_ns * 1e-9, cost.prompt_positions, cost.prompt_start
            if seconds <= 0:
                continue
            inputs = self._inputs(prompt, cost.decode_rows, cost.context, prompt * (start + prompt / 2))
            for _ in range(_SEED_WEIGHT):
                self._seed.add([x / seconds for x in inputs], 1.0)
            self._largest_prefill = max(self._largest_prefill, prompt)
            if cost.decode_rows == 1 and not prompt:
                self._measured_row_s = seconds
        self._fit()
        self._seed_weights = self._weights
        alone = sorted(
            (cost.prompt_positions, cost.step_ns / cost.prompt_positions)
            for cost in costs
            if cost.prompt_positions and not cost.decode_rows and not cost.prompt_start
        )
        least = min((each for _, each in alone), default=0.0)
        enough = [positions for positions, each in alone if each <= _EFFICIENT * least]
        self.efficient_prefill = _SPARSE_EFFICIENT if self.is_sparse else min(enough, default=_UNMEASURED_EFFICIENT)

    # ------------------------------------------------------------------ observations

    def note(
        self,
        starts: Any,
        counts: Any,
        num_decode: int,
        step_s: float,
        runner_s: float,
        waited: bool = False,
        drafted: Any = None,
    ) -> None:
        """Notes a step whose rows, decoding ones first, have these starts and counts (int32 [R] each).

        A decoding row with a count above 1 verifies up to count - 1 drafts; `drafted` (int32 [R]): drafts that each row
        verified, None if no row had any to verify.

        `step_s`: its seconds as the scheduler sees them; 0 or less if unknown. `runner_s`: as the runner measured them;
        0 if it did not. `waited`: the runner had no plan before this one, so that `step_s` includes its way; it then
        says nothing about the step. The arrays must not change afterwards.
        """
        has_prompts = num_decode < len(starts)
        self.prompt_share += (has_prompts - self.prompt_share) / _SHARE_MEMORY
        if has_prompts:
            self._mixed_ticks += 1
            if self._mixed_ticks % _MIXED_SAMPLE and self.known:
                return
        else:
            self._decode_ticks += 1
            if self._has_drafter and self.verifying.note(starts, counts, step_s, runner_s, waited, drafted):
                return
            if self._decode_ticks % _DECODE_SAMPLE:
                return
        if step_s > 0 and (runner_s > 0 or not waited):
            self._noted.append((starts, counts, num_decode, step_s, runner_s))

    def _observe(self) -> None:
        """Uses the noted steps."""
        noted = self._noted
        while noted:
            starts, counts, num_decode, step_s, runner_s = noted.popleft()
            seconds = runner_s or step_s
            inputs, prompts = self._inputs_of(starts, counts, num_decode)
            self._largest_prefill = max(self._largest_prefill, prompts)
            if prompts and num_decode and self.known:
                self._tail.add(step_s - self._predicted(inputs))
                self._delay = None
            measured_s = self._predicted(inputs, self._seed_weights)
            if measured_s > 0:
                ratio = min(_DRIFTS[1], max(_DRIFTS[0], seconds / measured_s))
                self._drift += (ratio - self._drift) / _DRIFT_MEMORY
            sums = self._mixed if prompts else self._decode
            sums.add([x / seconds for x in inputs], 1.0)
            if self._decode.count + self._mixed.count - self._fitted >= _REFIT_EVERY:
                self._fit()

    def _fit(self) -> None:
        self._fitted = self._decode.count + self._mixed.count
        seed = self._seed
        if seed.count:
            observed = min(_MEMORY, self._decode.count) + min(_MEMORY, self._mixed.count)
            seed = seed.with_weight(max(1.0, _SEED_SHARE * observed / seed.count), 1 / self._drift)
        self._weights = solve((seed, self._decode, self._mixed))
        self.on_fit()

    # ------------------------------------------------------------------ what the timing of plans reads

    def expected_s(self, starts: Any, counts: Any, num_decode: int, drafts: bool = False) -> float:
        """Returns the time of the planned step with these rows, as `note` takes them; 0 if nothing is known.

        Decode steps take as long as the last ones of as many rows: the runner's choice of kernels depends on their
        number. Steps with prompts differ too much from one another for that: the model predicts them, and those that
        verify `drafts`.
        """
        rows, prefills = len(starts), num_decode < len(starts)
        if drafts and not prefills:
            return self.verifying.planned_s(starts, counts)
        if not prefills and (recent_s := self.recent.median_s(rows, False)):
            return recent_s
        if self.known:
            return self._predicted(self._inputs_of(starts, counts, num_decode)[0])
        return self.recent.median_s(int(np.add.reduce(counts)), prefills)

    # ------------------------------------------------------------------ what policies read

    @property
    def known(self) -> bool:
        """Whether it predicts: the runner has measured its steps, or enough have been observed, some with prompts."""
        self._observe()
        return self._predicts

    @property
    def _predicts(self) -> bool:
        observed = self._decode.count + self._mixed.count
        return bool(self._seed.count) or (observed >= _KNOWN_AFTER and self._mixed.count >= _REFIT_EVERY)

    @property
    def row_s(self) -> float:
        """Seconds of a step that decodes one row of a short context, as the runner measured it; otherwise predicted."""
        return self._measured_row_s or self.seconds(0, 1, _USUAL_CONTEXT)  # not the drift: a target should not move

    @property
    def fitted_row_s(self) -> float:
        """Seconds of such a step by the latest fit, so that it follows a machine that has become slower; 0 before the
        first one."""
        return self._predicted(self._inputs(0, 1, _USUAL_CONTEXT, 0.0))

    @property
    def position_s(self) -> float:
        """Seconds that one more prompt position takes in a large step, without its attention."""
        self._observe()
        return self._weights[2] * _SCALE[2]

    def seconds(self, prefill_tokens: float, decode_rows: int, context: int, start: int = 0) -> float:
        """Returns the predicted time of a step, in seconds; 0 if nothing is known.

        Its prompt positions, `prefill_tokens`, are those of one chunk that starts at position `start`.
        """
        self._observe()
        pairs = prefill_tokens * (start + prefill_tokens / 2)
        return self._predicted(self._inputs(prefill_tokens, decode_rows, context, pairs))

    def verify_s(self, rows: int, drafts: float, context: int) -> float:
        """Returns the predicted time of a decode step of `rows` rows that verifies `drafts` drafts in all, in seconds;
        0 if nothing is known.

        On a GPU, where a step is one graph, all rows cost as much as the one with the most drafts: `drafts` are the
        rows times those. In a mixture of experts, more positions read more experts; measured and observed times hold
        that.
        """
        return self.verifying.seconds(rows, drafts, context)

    @property
    def overhead_s(self) -> float:
        """Seconds of a step with prompts besides what its positions and rows take."""
        self._observe()
        return self._weights[0] + self._weights[1]

    def delay_s(self, share: float) -> float:
        """Returns the seconds, at least 0, by which a share `share` of steps with prompts take at most longer."""
        self._observe()
        if self._delay is None or self._delay[0] != share:
            self._delay = share, self._tail.quantile_s(share)
        return self._delay[1]

    def planned_s(self, target_s: float, share: float) -> float:
        """Returns the predicted time of steps with prompts, a share `share` of which take at most `target_s`.

        It leaves room for their delays, but for no more than a fifth of the target.
        """
        return target_s - min(self.delay_s(share), _MOST_DELAY * target_s)

    def prefill_tokens_within(
        self, seconds: float, decode_rows: int, context: int, start: int = 0, left: float = math.inf
    ) -> float:
        """Returns the maximum number of prompt positions, in whole tiles, of a step predicted to take `seconds`.

        The first `left` of them continue a prompt at position `start`; the others begin new ones. If no whole tile
        fits, returns the number that would fit without tiles; it is negative if the decoding rows alone take longer.
        At most twice those of the largest step so far: the model does not extrapolate reliably.
        """
        self._observe()
        per_token = self._weights[2] * _SCALE[2]
        per_pair = self._weights[5] * _SCALE[5]
        rest = seconds - self._predicted((1.0, 1.0, 0.0, *self._inputs(0, decode_rows, context, 0.0)[3:]))
        rest -= per_token * decode_rows
        if rest <= 0:
            return rest / per_token if per_token > 0 else -math.inf
        if per_token <= 0 and per_pair <= 0:
            return 2 * self._largest_prefill
        tokens = _positive_root(per_pair / 2, per_token + per_pair * start, rest)
        if tokens > left:
            rest -= per_pair * start * left
            tokens = max(left, _positive_root(per_pair / 2, per_token, rest)) if rest > 0 else left
        whole_tiles = (tokens + decode_rows) // self._tile * self._tile - decode_rows
        return min(whole_tiles if whole_tiles > 0 else tokens, 2 * self._largest_prefill)

    def _decode_s(self, rows: int, context: int) -> float:
        """Returns the seconds of a decode step by the first weights, to which ratios can refer for ever; 0 before the
        model predicts."""
        if not self._first_weights:
            if not self._predicts:
                return 0.0
            self._first_weights = self._weights
        return self._predicted(self._inputs(0, rows, context, 0.0), self._first_weights)

    def _position_s(self, context: int) -> float:
        """Returns the predicted seconds of one more position that reads `context` KV positions."""
        return self._weights[2] * _SCALE[2] + self._weights[5] * _SCALE[5] * context

    def _predicted(self, inputs: Inputs, weights: list[float] | None = None) -> float:
        return sum(map(mul, inputs, weights or self._weights))

    def _inputs_of(self, starts: Any, counts: Any, num_decode: int) -> tuple[Inputs, int]:
        """Returns the inputs of a step with these rows, and its prompt positions."""
        prompts, pairs = 0, 0.0
        if num_decode < len(starts):
            chunks = counts[num_decode:].astype(np.float64)
            prompts = int(chunks.sum())
            pairs = float(chunks @ (starts[num_decode:] + chunks / 2))
        return self._inputs(prompts, num_decode, int(np.add.reduce(starts[:num_decode])), pairs), prompts

    def _inputs(self, prefill_tokens: float, decode_rows: int, context: int, pairs: float) -> Inputs:
        charged = -(-(prefill_tokens + decode_rows) // self._tile) * self._tile
        return (
            1.0,
            1.0 if prefill_tokens else 0.0,
            charged * _SCALE[2],
            decode_rows * _SCALE[3],
            context * _SCALE[4],
            pairs * _SCALE[5],
        )


def _positive_root(square: float, linear: float, value: float) -> float:
    """Returns x > 0 with square * x^2 + linear * x = value, for coefficients >= 0, not both 0, and value > 0."""
    return 2 * value / (linear + math.sqrt(linear * linear + 4 * square * value))
