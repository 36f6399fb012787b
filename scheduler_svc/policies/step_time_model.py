"""How long a step will take, learnt from the steps before: what `adaptive` and `deadline` plan with.

    seconds = w0 + w1 * prefill tokens + w2 * decoding rows + w3 * context, all w >= 0

by least squares with exponential forgetting over the results' reports, and a factor for the tail: the quantile of
(seconds taken / predicted), tracked online by stochastic steps on the pinball loss (Robbins-Monro). Load is an input,
not something to be learnt anew, so a shift of load finds the model ready.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scheduler_svc.policy import StepReport

_SCALE = np.array([1.0, 1e-3, 1e-2, 1e-5])
"""Brings the inputs to about 1."""
_REFIT_EVERY = 8
_RIDGE = 1e-4


class StepTimeModel:
    """Learns with `observe`; `seconds` and `prefill_tokens_within` ask it."""

    def __init__(self, tail: float = 0.01, memory: int = 1000) -> None:
        """`tail`: share of steps that may take longer than `tail_factor` times the prediction. `memory`: steps after
        which an observation weighs a third."""
        self.num_steps = 0
        """Reports learnt from."""
        self.largest_prefill = 0
        """Most prefill tokens of a step so far."""
        self.tail_factor = 1.15
        self._tail = tail
        self._forget = 1 - 1 / memory
        self._gram = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._weights = np.zeros(4)

    def observe(self, report: StepReport) -> None:
        """A step that took `report.step_s`."""
        if report.step_s <= 0:  # came together with the result before it: its time is in that one's
            return
        x = self._inputs(report.prefill_tokens, report.decode_rows, report.context)
        if self.num_steps > 4 * _REFIT_EVERY:
            self._track_tail(report.step_s, float(x @ self._weights))
        self._gram = self._gram * self._forget + np.outer(x, x)
        self._moment = self._moment * self._forget + x * report.step_s
        self.num_steps += 1
        self.largest_prefill = max(self.largest_prefill, report.prefill_tokens)
        if self.num_steps % _REFIT_EVERY == 0:
            self._weights = _nonnegative_solution(self._gram, self._moment)

    def seconds(self, prefill_tokens: float, decode_rows: int, context: int) -> float:
        """Predicted time of a step."""
        return float(self._inputs(prefill_tokens, decode_rows, context) @ self._weights)

    def prefill_tokens_within(self, seconds: float, decode_rows: int, context: int) -> float:
        """Most prefill tokens with which the step stays below `seconds`, tail included; may be negative."""
        rest = seconds / self.tail_factor - self.seconds(0, decode_rows, context)
        per_token = float(self._weights[1] * _SCALE[1])
        return rest / per_token if per_token > 0 else math.copysign(math.inf, rest)

    def _track_tail(self, seconds: float, predicted: float) -> None:
        """One step of the factor towards the quantile 1 - tail of seconds / predicted."""
        if predicted <= 0:
            return
        above = seconds > predicted * self.tail_factor
        self.tail_factor *= math.exp(0.02 * (float(above) - self._tail))
        self.tail_factor = min(4.0, max(1.0, self.tail_factor))

    @staticmethod
    def _inputs(prefill_tokens: float, decode_rows: int, context: int) -> npt.NDArray[np.float64]:
        return np.array([1.0, prefill_tokens, decode_rows, context]) * _SCALE


def _nonnegative_solution(gram: npt.NDArray[np.float64], moment: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares from its normal equations; inputs whose weight would be negative are left out one by one."""
    used = list(range(len(moment)))
    gram = gram + np.diag(_RIDGE * gram.diagonal() + 1e-9)
    while used:
        weights = np.linalg.solve(gram[np.ix_(used, used)], moment[used])
        if weights.min() >= 0:
            solution = np.zeros(len(moment))
            solution[used] = weights
            return solution
        del used[int(weights.argmin())]
    return np.zeros(len(moment))
