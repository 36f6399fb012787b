"""How many times as long a step with drafts takes as its rows alone: a table over rows and drafts per row.

It has no assumed form between its cells, only linear interpolation. Each observation corrects the cells around it. A
cell that was never observed follows the others: what drafts add there differs from the seed by the same factor as in
the observed cells beside it.
"""

from __future__ import annotations

import math
from bisect import bisect_right

KNOTS = (0.0, 1 / 16, 1 / 4, 1.0, 2.0, 3.0, 5.0, 7.0, 15.0)
"""Drafts per row of the table's columns."""
NUM_ROWS = 11
"""Rows of the table: 1, 2, 4, ..., 1024 rows of a step."""
_LEAST_RATE = 0.06
"""Share of an observation's error by which a cell is corrected, once it has seen some: about 16 of them count."""
_LONGER = 1.0
"""Part of the expected time by which an observation counts as longer at most, so that a pause changes little."""
_LEAST_RATIO = 0.05
_FACTORS = (0.1, 10.0)
"""Bounds of the factor by which what drafts add differs from the seed."""
_LEAST_EXTRA = 0.02
"""What drafts add to a step's time, relative to it, below which that factor says nothing."""
_FACTOR_RATE = 0.1
"""Weight of an observation in the factors that hold for all rows."""


class RatioTable:
    """The ratios of one runner."""

    def __init__(self, seed: list[list[float]], count: float) -> None:
        """`seed`: ratios of `NUM_ROWS` rows at `KNOTS`, which count as `count` observations each."""
        self._seed = seed
        self._ratios = [[1.0] * len(KNOTS) for _ in range(NUM_ROWS)]  # of cells with observations
        self._counts = [[count] * len(KNOTS) for _ in range(NUM_ROWS)]
        self._seen = [[False] * len(KNOTS) for _ in range(NUM_ROWS)]
        self._filled: dict[int, list[float]] = {}  # rows since the last correction
        self._factor = self._pace = 1.0  # of all rows: what drafts add, and steps without, relative to the seed

    def ratios(self, rows: int) -> list[float]:
        """Returns the ratios of a step of `rows` rows with each of `KNOTS` drafts per row."""
        row, part = _place(rows)
        ratios = self._row(row)
        if not part:
            return ratios
        return [low + part * (high - low) for low, high in zip(ratios, self._row(row + 1), strict=True)]

    def knows_undrafted(self, rows: int) -> bool:
        """Whether steps of about `rows` rows without drafts were measured or observed."""
        row, part = _place(rows)
        return self._counts[row][0] > 0 and (not part or self._counts[row + 1][0] > 0)

    def correct(self, rows: int, each: float, ratio: float) -> None:
        """Corrects the cells around a step of `rows` rows with `each` drafts per row, by its observed ratio."""
        row, row_part = _place(rows)
        column = min(bisect_right(KNOTS, each), len(KNOTS) - 1) - 1
        column_part = min(1.0, (each - KNOTS[column]) / (KNOTS[column + 1] - KNOTS[column]))
        cells = [
            (r, c, row_weight * column_weight)
            for r, row_weight in ((row, 1 - row_part), (row + 1, row_part))
            for c, column_weight in ((column, 1 - column_part), (column + 1, column_part))
            if row_weight * column_weight > 0
        ]
        now = {r: self._row(r) for r in ((row, row + 1) if row_part else (row,))}
        expected = sum(now[r][c] * weight for r, c, weight in cells)
        error = min(ratio - expected, _LONGER * expected)
        norm = sum(weight * weight for _, _, weight in cells)
        for r, c, weight in cells:
            self._counts[r][c] += weight
            rate = max(1 / (1 + self._counts[r][c]), _LEAST_RATE)
            self._ratios[r][c] = max(_LEAST_RATIO, now[r][c] + rate * weight / norm * error)
            self._seen[r][c] = True
        self._filled.clear()
        self._learn_factors(row + (row_part > 0.5), column + (column_part > 0.5))

    def _learn_factors(self, row: int, column: int) -> None:
        """Adds the corrected cell to the factors that hold for all rows."""
        seed, ratios, seen = self._seed[row], self._ratios[row], self._seen[row]
        if not seen[column]:
            return
        if not column:
            self._pace += _FACTOR_RATE * (ratios[0] / seed[0] - self._pace)
            return
        alone = ratios[0] if seen[0] else seed[0] * self._pace
        self._factor += _FACTOR_RATE * (_factor(ratios[column] - alone, seed[column] - seed[0]) - self._factor)

    def _row(self, row: int) -> list[float]:
        """Returns the ratios of one row; those without observations follow the others."""
        filled = self._filled.get(row)
        if filled is None:
            filled = self._filled[row] = self._fill(row)
        return filled

    def _fill(self, row: int) -> list[float]:
        seed, ratios, seen = self._seed[row], self._ratios[row], self._seen[row]
        alone = ratios[0] if seen[0] else seed[0] * self._pace
        known = [c for c in range(1, len(KNOTS)) if seen[c]]
        factors = [_factor(ratios[c] - alone, seed[c] - seed[0]) for c in known]
        filled, passed = [alone], 0  # known columns up to the present one
        for c in range(1, len(KNOTS)):
            if seen[c]:
                passed += 1
                filled.append(ratios[c])
                continue
            factor = factors[min(passed, len(known) - 1)] if known else self._factor
            if 0 < passed < len(known):
                before, after = KNOTS[known[passed - 1]], KNOTS[known[passed]]
                factor = factors[passed - 1] + (KNOTS[c] - before) / (after - before) * (factor - factors[passed - 1])
            filled.append(alone + (seed[c] - seed[0]) * factor)
        return filled


def _factor(extra: float, expected: float) -> float:
    """Returns what drafts add relative to what they should; 1 if both are nearly nothing."""
    if abs(extra) < _LEAST_EXTRA > abs(expected):
        return 1.0
    return min(_FACTORS[1], max(_FACTORS[0], extra / max(_LEAST_EXTRA, expected)))


def _place(rows: int) -> tuple[int, float]:
    """Returns the table's row at or below this number of rows, and how far it is towards the next one, 0 to 1."""
    place = math.log2(max(1, rows))
    row = int(place)
    return (row, place - row) if row < NUM_ROWS - 1 else (NUM_ROWS - 1, 0.0)
