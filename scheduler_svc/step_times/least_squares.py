"""Nonnegative least squares from running sums, in plain Python: for a few inputs, numpy's calls cost more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

_RIDGE = 1e-4
"""Added to the diagonal, relative to it: enough to make inputs that are multiples of each other solvable, too little to
show in a prediction."""


class RunningSums:
    """Sums of products of `size` inputs with each other and with a value; earlier observations fade."""

    def __init__(self, size: int, memory: float) -> None:
        """`memory` is the number of observations after which one weighs about a third."""
        self.gram = [[0.0] * size for _ in range(size)]
        """Lower triangle; the rest is unused."""
        self.moment = [0.0] * size
        self.count = 0
        """Observations so far."""
        self._keep = 1 - 1 / memory

    def add(self, inputs: Sequence[float], value: float) -> None:
        """Adds an observation."""
        keep = self._keep
        for i, (x, row) in enumerate(zip(inputs, self.gram, strict=True)):
            for j in range(i + 1):
                row[j] = row[j] * keep + x * inputs[j]
            self.moment[i] = self.moment[i] * keep + x * value
        self.count += 1

    def with_weight(self, weight: float, factor: float) -> RunningSums:
        """Returns the sums of the same observations, each `weight` times, with all inputs `factor` times as large."""
        scaled = RunningSums(len(self.moment), math.inf)
        scaled.gram = [[weight * factor * factor * x for x in row] for row in self.gram]
        scaled.moment = [weight * factor * x for x in self.moment]
        scaled.count = self.count
        return scaled


def solve(parts: Sequence[RunningSums]) -> list[float]:
    """Returns the nonnegative weights with the least squared error over all observations of `parts`."""
    size = len(parts[0].moment)
    gram = [[sum(part.gram[max(i, j)][min(i, j)] for part in parts) for j in range(size)] for i in range(size)]
    return nonnegative_solution(gram, [sum(part.moment[i] for part in parts) for i in range(size)])


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
