"""Model of a step's time, learned from earlier steps; `adaptive` and `deadline` plan with it.

    seconds = w0 + w1 * prefill tokens + w2 * decoding rows + w3 * context, all w >= 0

The weights come from least squares with exponential forgetting over step reports. Prefill tokens include the unused
room in the step's last tile (`Load.tile_tokens`). A factor for the tail is the quantile of (seconds taken / predicted),
tracked online by stochastic steps on the pinball loss (Robbins-Monro). The load is an input of the model, so a shift of
load needs no relearning.
"""

from __future__ import annotations

import math
from operator import mul

from scheduler_svc.policy import StepReport

_SCALE = (1.0, 1e-3, 1e-2, 1e-5)
"""Factors that scale the inputs to about 1."""
_TRIANGLE = ((0, 1, 3, 6), (1, 2, 4, 7), (3, 4, 5, 8), (6, 7, 8, 9))
"""Index of the product of two inputs in the lower triangle, stored row by row."""
_REFIT_EVERY = 8
_RIDGE = 1e-4

Inputs = tuple[float, float, float, float]
"""1, prefill tokens, decoding rows and context, scaled by `_SCALE`."""


class StepTimeModel:
    """Step-time model that learns online.

    It is plain Python: for four inputs, numpy's call overhead exceeds the arithmetic.
    """

    def __init__(self, tail: float = 0.01, memory: int = 1000) -> None:
        """`tail` is the share of steps that may take longer than `tail_factor` times the prediction. `memory` is the
        number of steps after which an observation weighs about a third."""
        self.num_steps = 0
        """Reports learned from."""
        self.largest_prefill = 0
        """Maximum number of prefill tokens in one step so far."""
        self.tail_factor = 1.15
        self._tail = tail
        self._forget = 1 - 1 / memory
        # Sums of products: of two inputs (the lower triangle, row by row), then of each input with the seconds.
        self._sums = [0.0] * 14
        self._weights = [0.0] * 4

    def observe(self, report: StepReport) -> None:
        """Learns from a step that took `report.step_s` seconds."""
        seconds = report.step_s
        if seconds <= 0:  # arrived together with the previous result, whose time includes this step
            return
        charged = _charged_prefill(report.prefill_tokens, report.decode_rows, report.tile_tokens)
        x = _inputs(charged, report.decode_rows, report.context)
        if self.num_steps > 4 * _REFIT_EVERY:
            self._track_tail(seconds, self._predicted(x))
        (one, p, r, c), s, forget = x, seconds, self._forget
        products = (one, p, p * p, r, r * p, r * r, c, c * p, c * r, c * c, s, p * s, r * s, c * s)
        self._sums = [known * forget + product for known, product in zip(self._sums, products, strict=True)]
        self.num_steps += 1
        self.largest_prefill = max(self.largest_prefill, report.prefill_tokens)
        if self.num_steps % _REFIT_EVERY == 0:
            gram = [[self._sums[place] for place in row] for row in _TRIANGLE]
            self._weights = nonnegative_solution(gram, self._sums[10:])

    def seconds(self, prefill_tokens: float, decode_rows: int, context: int, tile_tokens: int = 1) -> float:
        """Returns the predicted time of a step, in seconds."""
        charged = _charged_prefill(prefill_tokens, decode_rows, tile_tokens)
        return self._predicted(_inputs(charged, decode_rows, context))

    def prefill_tokens_within(self, seconds: float, decode_rows: int, context: int, tile_tokens: int = 1) -> float:
        """Returns the maximum number of prefill tokens in whole tiles for a step, tail included, below `seconds`.

        If no whole tile fits, returns the number that would fit without tiles; it is negative if the decoding rows
        alone exceed `seconds`.
        """
        rest = seconds / self.tail_factor - self.seconds(0, decode_rows, context)
        per_token = self._weights[1] * _SCALE[1]
        if per_token <= 0:
            return math.copysign(math.inf, rest)
        tokens = rest / per_token
        whole_tiles = (tokens + decode_rows) // tile_tokens * tile_tokens - decode_rows
        return whole_tiles if whole_tiles > 0 else tokens

    def _predicted(self, x: Inputs) -> float:
        return sum(map(mul, x, self._weights))

    def _track_tail(self, seconds: float, predicted: float) -> None:
        """Moves the tail factor one step towards the quantile 1 - tail of seconds / predicted."""
        if predicted <= 0:
            return
        above = seconds > predicted * self.tail_factor
        self.tail_factor *= math.exp(0.02 * (float(above) - self._tail))
        self.tail_factor = min(4.0, max(1.0, self.tail_factor))


def _charged_prefill(prefill_tokens: float, decode_rows: int, tile_tokens: int) -> float:
    """Returns the prefill tokens plus the unused room of the step's last tile; 0 if there are no prefill tokens."""
    if not prefill_tokens:
        return 0
    return -(-(prefill_tokens + decode_rows) // tile_tokens) * tile_tokens - decode_rows


def _inputs(prefill_tokens: float, decode_rows: int, context: int) -> Inputs:
    one, per_token, per_row, per_position = _SCALE
    return one, prefill_tokens * per_token, decode_rows * per_row, context * per_position


def nonnegative_solution(gram: list[list[float]], moment: list[float]) -> list[float]:
    """Solves least squares from its normal equations, with a small ridge. Removes inputs whose weight would be negative
    one by one, the most negative first, and gives them weight 0."""
    used = list(range(len(moment)))
    while used:
        rows = [[gram[i][j] * (1 + _RIDGE * (i == j)) + 1e-9 * (i == j) for j in used] for i in used]
        weights = _solution(rows, [moment[i] for i in used])
        least = min(weights)
        if least >= 0:
            known = dict(zip(used, weights, strict=True))
            return [known.get(i, 0.0) for i in range(len(moment))]
        del used[weights.index(least)]
    return [0.0] * len(moment)


def _solution(rows: list[list[float]], right: list[float]) -> list[float]:
    """Solves rows @ x = right by elimination. `rows` is symmetric and positive definite, so no pivoting is needed.
    Overwrites its arguments."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            if factor:
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
                right[j] -= factor * right[i]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (right[i] - sum(map(mul, rows[i][i + 1 :], x[i + 1 :]))) / rows[i][i]
    return x
