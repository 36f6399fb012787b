"""What a step that verifies drafts takes: seeded by what the runner measured at start, corrected by its steps.

    seconds = seconds of the rows without drafts * ratio(rows, drafts per row) + delay

The first factor is that of `StepTimeModel`. The ratio is a table over rows and drafts per row, with linear
interpolation, so it has no assumed form: on a GPU a few positions more are nearly free up to some number of rows, a
mixture of experts reads more experts for more positions, and a CPU computes each of them. Its seed are the measured
steps that have `StepCost.drafts`, which contain all of this; without any, a draft is taken to cost as much as a prompt
position. Each observed step corrects the cells around it. A cell that was never observed follows the others: what
drafts add there differs from the seed by the same factor as in the observed cells beside it.

*Drafts* are those that cost time. On a GPU a verify step is a captured graph for all of its rows, so they are the rows
times the graph's number; elsewhere they are those that were verified.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2

GRAPH_DRAFTS = (1, 3, 5, 7)
"""Drafts per row for which a GPU runner captures graphs: with 4 query heads per KV head, they fill whole tiles."""
KNOTS = (0.0, 1 / 16, 1 / 4, 1.0, 2.0, 3.0, 5.0, 7.0, 15.0)
"""Drafts per row of the table's columns."""
KNOTS_COLUMN = np.array(KNOTS)
_NUM_ROWS = 11
"""Rows of the table: 1, 2, 4, ..., 1024 rows of a step."""
_LEAST_RATE = 0.06
"""Share of an observation's error by which a cell is corrected, once it has seen some: about 16 of them count."""
_SEED_COUNT = 4.0
"""Observations for which a measured cell counts."""
_LONGER = 1.0
"""Part of the expected time by which an observation counts as longer at most, so that a pause changes little."""
_FACTORS = (0.1, 10.0)
"""Bounds of the factor by which what drafts add differs from the seed."""
_LEAST_EXTRA = 0.02
"""What drafts add to a step's time, relative to it, below which that factor says nothing."""
_FACTOR_RATE = 0.1
_UNKNOWN_EXTRA = 0.3
"""Time that a draft per row adds, relative to the rows alone, while nothing is known of the runner."""
_DELAY_RATE = 1 / 32
_FEWEST_DELAYS = 8
"""Steps with drafts after which they have a delay of their own."""


class VerifyTimes:
    """Times of decode steps with and without drafts, of one runner."""

    def __init__(self, decode_s: Callable[[int, int], float], position_s: Callable[[int], float], pads: bool) -> None:
        """`decode_s(rows, context)`: predicted seconds of a decode step, 0 if unknown. `position_s(context)`: those of
        one more position that reads `context` KV positions. `pads`: the runner is a GPU."""
        self.pads = pads
        self.changes = 0
        """Number of observations so far."""
        self.verified_share = 1.0
        """Share of the planned drafts that steps verify."""
        self._decode_s, self._position_s = decode_s, position_s
        self._seed: list[list[float]] = []  # ratios before the first observation
        self._ratios: list[list[float]] = []  # of cells with observations
        self._counts: list[list[float]] = []  # observations of each cell, the seed's too
        self._seen: list[list[bool]] = []
        self._factor = self._pace = 1.0  # of all rows: what drafts add, and steps without, relative to the seed
        self._delay_s, self._num_delays = [0.0, 0.0], [0, 0]  # of steps without and with drafts
        self._rough_s = 0.0  # of the first decode step: the unit of the ratios while nothing is predicted
        self._is_predicted: bool | None = None
        self._costs: list[plan_pb2.StepCost] = []

    def seed(self, costs: Sequence[plan_pb2.StepCost]) -> None:
        """Starts from the steps that the runner measured."""
        self._costs = [cost for cost in costs if cost.decode_rows and not cost.prompt_positions]
        self._is_predicted = None

    # ------------------------------------------------------------------ what is read

    def charged(self, rows: int, drafts: float, most: int) -> float:
        """Returns how many drafts cost time in a step of `rows` rows with `drafts` in all, `most` of one row."""
        if not self.pads or not most:
            return drafts
        return rows * next((graph for graph in GRAPH_DRAFTS if graph >= most), most)

    def curve(self, rows: int, context: int) -> npt.NDArray[np.float64]:
        """Returns the seconds of a step of `rows` rows with each of `KNOTS` drafts per row; they never decrease."""
        base_s = self._base_s(rows, context)
        row, part = _place(rows)
        ratios = self._row(row)
        if part:
            ratios = [low + part * (high - low) for low, high in zip(ratios, self._row(row + 1), strict=True)]
        delay_s, most_s = self._delay(True), 0.0
        seconds = [ratios[0] * base_s + self._delay(False)]
        for ratio in ratios[1:]:
            most_s = max(most_s, ratio * base_s + delay_s)
            seconds.append(max(most_s, seconds[0]))
        return np.array(seconds)

    def seconds(self, rows: int, drafts: float, context: int) -> float:
        """Returns the predicted seconds of a step whose drafts that cost time are `drafts` in all."""
        return float(np.interp(drafts / max(1, rows), KNOTS_COLUMN, self.curve(rows, context)))

    @property
    def known(self) -> bool:
        """Whether its times are seconds; before, they are relative to those of other steps."""
        return bool(self._is_predicted or self._rough_s)

    def lacks_undrafted(self, rows: int) -> bool:
        """Whether no step of about `rows` rows without drafts was measured or observed, with which others could be
        compared."""
        row, part = _place(rows)
        return not self._counts or not (self._counts[row][0] and (not part or self._counts[row + 1][0]))

    def planned_s(self, rows: int, context: int, planned: int, most: int) -> float:
        """Returns the seconds of a step that is to verify `planned` drafts in all, `most` of one row; 0 if nothing is
        known. Elsewhere than on a GPU, the drafter may have fewer, as usual."""
        if not self._decode_s(rows, context) and not self._rough_s:
            return 0.0
        return self.seconds(rows, self.charged(rows, planned * self.verified_share, most), context)

    def _delay(self, drafts: bool) -> float:
        return max(0.0, self._delay_s[drafts and self._num_delays[1] >= _FEWEST_DELAYS])

    def _base_s(self, rows: int, context: int) -> float:
        """Returns the seconds of the rows alone, to which the ratios refer; 1 if nothing is known."""
        seconds = self._decode_s(rows, context)
        if self._is_predicted is not (seconds > 0):
            self._is_predicted = seconds > 0
            self._begin()
        return seconds or self._rough_s or 1.0

    # ------------------------------------------------------------------ observations

    def note(
        self,
        rows: int,
        context: int,
        seconds: float,
        delay_s: float | None = None,
        planned: int = 0,
        verified: int = 0,
        most: int = 0,
    ) -> None:
        """Records a decode step of `rows` rows with `context` KV positions before them that took `seconds`.

        `delay_s`: how much longer the scheduler saw it take; None if that is unknown. `planned`, `verified`: drafts in
        all; `most`: planned drafts of one row.
        """
        if planned:
            self.verified_share += (verified / planned - self.verified_share) * _DELAY_RATE
        drafts = self.charged(rows, verified, most)
        if not drafts and not self._rough_s:
            self._rough_s = seconds
        base_s = self._base_s(rows, context)
        if not self.known:
            return  # there is no step without drafts to compare with
        if delay_s is not None:
            kind = drafts > 0
            self._num_delays[kind] += 1
            rate = max(1 / self._num_delays[kind], _DELAY_RATE)
            self._delay_s[kind] += rate * (max(-base_s, min(base_s, delay_s)) - self._delay_s[kind])
        self._correct(rows, drafts / max(1, rows), seconds / base_s)
        self.changes += 1

    def _correct(self, rows: int, each: float, ratio: float) -> None:
        """Corrects the cells around an observed ratio, and those that were never observed."""
        row, row_part = _place(rows)
        column = min(bisect_right(KNOTS, each), len(KNOTS) - 1) - 1
        column_part = min(1.0, (each - KNOTS[column]) / (KNOTS[column + 1] - KNOTS[column]))
        cells = [
            (r, c, row_weight * column_weight)
            for r, row_weight in ((row, 1 - row_part), (row + 1, row_part))
            for c, column_weight in ((column, 1 - column_part), (column + 1, column_part))
            if row_weight * column_weight > 0
        ]
        rows_of = {r: self._row(r) for r in ((row, row + 1) if row_part else (row,))}
        expected = sum(rows_of[r][c] * weight for r, c, weight in cells)
        error = min(ratio - expected, _LONGER * expected)
        norm = sum(weight * weight for _, _, weight in cells)
        for r, c, weight in cells:
            self._counts[r][c] += weight
            rate = max(1 / (1 + self._counts[r][c]), _LEAST_RATE)
            self._ratios[r][c] = max(0.05, rows_of[r][c] + rate * weight / norm * error)
            self._seen[r][c] = True
        nearest = row + (row_part > 0.5)
        seed, now = self._seed[nearest], self._ratios[nearest]
        if not each:
            self._pace += _FACTOR_RATE * (now[0] / seed[0] - self._pace)
        else:
            column += column_part > 0.5
            alone = now[0] if self._seen[nearest][0] else seed[0] * self._pace
            if self._seen[nearest][column]:
                self._factor += _FACTOR_RATE * (_factor(now[column] - alone, seed[column] - seed[0]) - self._factor)

    def _row(self, row: int) -> list[float]:
        """Returns the ratios of one row; those without observations follow the others."""
        seed, ratios, seen = self._seed[row], self._ratios[row], self._seen[row]
        alone = ratios[0] if seen[0] else seed[0] * self._pace
        known = [c for c in range(1, len(KNOTS)) if seen[c]]
        if len(known) == len(KNOTS) - 1:
            return [alone, *ratios[1:]]
        factors = [_factor(ratios[c] - alone, seed[c] - seed[0]) for c in known]
        filled, passed = [alone], 0  # known columns up to the present one
        for c in range(1, len(KNOTS)):
            if seen[c]:
                passed += 1
                filled.append(ratios[c])
                continue
            factor = self._factor if not known else factors[min(passed, len(known) - 1)]
            if 0 < passed < len(known):
                part = (KNOTS[c] - KNOTS[known[passed - 1]]) / (KNOTS[known[passed]] - KNOTS[known[passed - 1]])
                factor = factors[passed - 1] + part * (factor - factors[passed - 1])
            filled.append(alone + (seed[c] - seed[0]) * factor)
        return filled

    # ------------------------------------------------------------------ the start

    def _begin(self) -> None:
        """Fills the table from the measured steps, or from the cost of a prompt position."""
        self._seen = [[False] * len(KNOTS) for _ in range(_NUM_ROWS)]
        measured = self._measured() if self._is_predicted else {}
        count = _SEED_COUNT if measured else 0.0
        self._counts = [[count] * len(KNOTS) for _ in range(_NUM_ROWS)]
        self._ratios = [[1.0] * len(KNOTS) for _ in range(_NUM_ROWS)]
        self._factor = self._pace = 1.0
        if not measured:
            extras = [self._assumed_extra(row) for row in range(_NUM_ROWS)]
            self._seed = [[1 + extra * knot for knot in KNOTS] for extra in extras]
            return
        places = sorted(measured)
        by_place = np.array([measured[place] for place in places])
        columns = [np.interp(range(_NUM_ROWS), places, by_place[:, c]) for c in range(len(KNOTS))]
        self._seed = np.array(columns).T.tolist()

    def _assumed_extra(self, row: int) -> float:
        """Returns what a draft per row adds to the time of 2**row rows, relative to it."""
        rows, context = 1 << row, 256
        base_s = self._decode_s(rows, rows * context)
        extra_s = rows * self._position_s(context)
        return extra_s / base_s if base_s > 0 and extra_s > 0 else _UNKNOWN_EXTRA

    def _measured(self) -> dict[float, list[float]]:
        """Returns the ratios at `KNOTS` for each number of rows with measured drafts, by its binary logarithm."""
        points: defaultdict[int, dict[float, float]] = defaultdict(dict)
        for cost in self._costs:
            base_s = self._decode_s(cost.decode_rows, cost.context)
            if base_s > 0 and cost.step_ns:
                points[cost.decode_rows].setdefault(float(cost.drafts), cost.step_ns * 1e-9 / base_s)
        return {math.log2(rows): _at_knots({0.0: 1.0} | ratios) for rows, ratios in points.items() if any(ratios)}


def _factor(extra: float, expected: float) -> float:
    """Returns what drafts add relative to what they should; 1 if that is nearly nothing."""
    if abs(extra) < _LEAST_EXTRA > abs(expected):
        return 1.0
    return min(_FACTORS[1], max(_FACTORS[0], extra / max(_LEAST_EXTRA, expected)))


def _at_knots(points: dict[float, float]) -> list[float]:
    """Returns the ratios at `KNOTS` by interpolation, and by the line of the last two points behind them."""
    xs = sorted(points)
    ys = [points[x] for x in xs]
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
    return [float(np.interp(knot, xs, ys)) + slope * max(0.0, knot - xs[-1]) for knot in KNOTS]


def _place(rows: int) -> tuple[int, float]:
    """Returns the table's row at or below this number of rows, and how far it is towards the next one, 0 to 1."""
    place = math.log2(max(1, rows))
    row = int(place)
    return (row, place - row) if row < _NUM_ROWS - 1 else (_NUM_ROWS - 1, 0.0)
