"""What a step that verifies drafts takes: seeded by what the runner measured at start, corrected by its steps.

    seconds = seconds of the rows without drafts * ratio(rows, drafts per row) + delay

The first factor is that of `StepTimeModel`. The ratio is a table over rows and drafts per row, with linear
interpolation, so it has no assumed form: on a GPU a few positions more are nearly free up to some number of rows, a
mixture of experts reads more experts for more positions, and a CPU computes each of them. Its seed are the measured
steps that have `StepCost.drafts`, which contain all of this; without any, a draft is taken to cost as much as a prompt
position. Each observed step corrects the cells around it. A cell that was never observed follows them: by their
difference in steps without drafts, and by the ratio of what drafts added otherwise.

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
_SCALES = (0.5, 2.0)
"""Bounds of the factor by which one observation changes what drafts add in cells that were never observed."""
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
        self._ratios: list[list[float]] = []
        self._counts: list[list[float]] = []
        self._seen: list[list[bool]] = []
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
        ratios = self._ratios[row]
        if part:
            ratios = [low + part * (high - low) for low, high in zip(ratios, self._ratios[row + 1], strict=True)]
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
        self._base_s(rows, 0)
        row, part = _place(rows)
        return not (self._counts[row][0] and (not part or self._counts[row + 1][0]))

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
        expected = sum(self._ratios[r][c] * weight for r, c, weight in cells)
        alone = self._ratios[row][0] * (1 - row_part) + (self._ratios[row + 1][0] * row_part if row_part else 0.0)
        error = min(ratio - expected, _LONGER * expected)
        norm = sum(weight * weight for _, _, weight in cells)
        before = [self._ratios[r][0] for r in (row, row + 1) if r < _NUM_ROWS]
        for r, c, weight in cells:
            self._counts[r][c] += weight
            rate = max(1 / (1 + self._counts[r][c]), _LEAST_RATE)
            self._ratios[r][c] = max(0.05, self._ratios[r][c] + rate * weight / norm * error)
            self._seen[r][c] = True
        self._shift(row, before)
        if each:
            now = sum(self._ratios[r][c] * weight for r, c, weight in cells)
            self._scale(column + 1, (now - alone) / max(0.02, expected - alone))

    def _shift(self, row: int, before: list[float]) -> None:
        """Moves the cells that were never observed by as much as the step without drafts has moved."""
        for r, was in enumerate(before, row):
            ratios, moved = self._ratios[r], self._ratios[r][0] - was
            if moved:
                self._ratios[r][1:] = [
                    x if s else x + moved for x, s in zip(ratios[1:], self._seen[r][1:], strict=True)
                ]

    def _scale(self, column: int, factor: float) -> None:
        """Scales what drafts add in all cells from this column on that were never observed."""
        factor = min(_SCALES[1], max(_SCALES[0], factor))
        if abs(factor - 1) < 1e-3:
            return
        for ratios, seen in zip(self._ratios, self._seen, strict=True):
            for c in range(column, len(KNOTS)):
                if not seen[c]:
                    ratios[c] = ratios[0] + (ratios[c] - ratios[0]) * factor

    # ------------------------------------------------------------------ the start

    def _begin(self) -> None:
        """Fills the table from the measured steps, or from the cost of a prompt position."""
        self._seen = [[False] * len(KNOTS) for _ in range(_NUM_ROWS)]
        measured = self._measured() if self._is_predicted else {}
        count = _SEED_COUNT if measured else 0.0
        self._counts = [[count] * len(KNOTS) for _ in range(_NUM_ROWS)]
        if not measured:
            self._ratios = [
                [1 + extra * knot for knot in KNOTS] for extra in map(self._assumed_extra, range(_NUM_ROWS))
            ]
            return
        places = sorted(measured)
        by_place = np.array([measured[place] for place in places])
        columns = [np.interp(range(_NUM_ROWS), places, by_place[:, c]) for c in range(len(KNOTS))]
        self._ratios = np.array(columns).T.tolist()

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
