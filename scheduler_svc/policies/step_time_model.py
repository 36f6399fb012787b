"""How long a step will take, learnt from the steps before: what `adaptive` and `deadline` plan with.

    seconds = w0 + w1 * prefill tokens + w2 * decoding rows + w3 * context, all w >= 0

by least squares with exponential forgetting over the results' reports, where prefill tokens include the room that is
left in the step's last tile (`Load.tile_tokens`), and a factor for the tail: the quantile of
(seconds taken / predicted), tracked online by stochastic steps on the pinball loss (Robbins-Monro). Load is an input,
not something to be learnt anew, so a shift of load finds the model ready.
"""

from __future__ import annotations

import math
from operator import mul

from scheduler_svc.policy import StepReport

_SCALE = (1.0, 1e-3, 1e-2, 1e-5)
"""Brings the inputs to about 1."""
_TRIANGLE = ((0, 1, 3, 6), (1, 2, 4, 7), (3, 4, 5, 8), (6, 7, 8, 9))
"""Where the product of two inputs stands among those of the lower triangle, row by row."""
_REFIT_EVERY = 8
_RIDGE = 1e-4

Inputs = tuple[float, float, float, float]
"""1, prefill tokens, decoding rows, context; scaled."""


class StepTimeModel:
    """Learns with `observe`; `seconds` and `prefill_tokens_within` ask it.

    In plain Python: for four inputs numpy's calls cost more than the arithmetic.
    """

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
        self._sums = [0.0] * 14  # of the products of two inputs, the lower triangle row by row, and with the seconds
        self._weights = [0.0] * 4

    def observe(self, report: StepReport) -> None:
        """A step that took `report.step_s`."""
        seconds = report.step_s
        if seconds <= 0:  # came together with the result before it: its time is in that one's
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
        """Predicted time of a step."""
        charged = _charged_prefill(prefill_tokens, decode_rows, tile_tokens)
        return self._predicted(_inputs(charged, decode_rows, context))

    def prefill_tokens_within(self, seconds: float, decode_rows: int, context: int, tile_tokens: int = 1) -> float:
        """Most prefill tokens with which the step stays below `seconds`, tail included: as many as fill whole tiles.
        Where that is none, what would fit without tiles; negative where not even the decoding rows stay below it."""
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
        """One step of the factor towards the quantile 1 - tail of seconds / predicted."""
        if predicted <= 0:
            return
        above = seconds > predicted * self.tail_factor
        self.tail_factor *= math.exp(0.02 * (float(above) - self._tail))
        self.tail_factor = min(4.0, max(1.0, self.tail_factor))


def _charged_prefill(prefill_tokens: float, decode_rows: int, tile_tokens: int) -> float:
    """Positions that the step's last tile has room for count as prompts', where there are any."""
    if not prefill_tokens:
        return 0
    return -(-(prefill_tokens + decode_rows) // tile_tokens) * tile_tokens - decode_rows


def _inputs(prefill_tokens: float, decode_rows: int, context: int) -> Inputs:
    one, per_token, per_row, per_position = _SCALE
    return one, prefill_tokens * per_token, decode_rows * per_row, context * per_position


def nonnegative_solution(gram: list[list[float]], moment: list[float]) -> list[float]:
    """Least squares from its normal equations, with a little ridge; inputs whose weight would be negative are left out
    one by one, the most negative first."""
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
    """x of rows @ x = right, by elimination; `rows` is symmetric and positive definite, so it needs no pivots. Spoils
    its arguments."""
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
