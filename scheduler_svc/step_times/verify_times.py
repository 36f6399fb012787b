"""What a step that verifies drafts takes: seeded by what the runner measured at start, corrected by its steps.

    seconds = seconds of the rows without drafts * ratio(rows, drafts per row) + delay

The first factor is that of `StepTimeModel` at the start. The ratio is a table (`RatioTable`), because it has no form
that holds everywhere: on a GPU a few positions more are nearly free up to some number of rows, a mixture of experts
reads more experts for more positions, and a CPU computes each of them. Its seed are the measured steps that have
`StepCost.drafts`, which contain all of this; without any, a draft is taken to cost as much as a prompt position. The
delay is what steps take longer as the scheduler sees them.

*Drafts* are those that cost time. On a GPU a verify step is a captured graph for all of its rows, so they are the rows
times the graph's number; elsewhere they are those that were verified.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from roster_common.link_protocol import GRAPH_DRAFTS, graph_drafts
from roster_protos import plan_pb2
from scheduler_svc.step_times.ratio_table import KNOTS, NUM_ROWS, RatioTable

KNOTS_COLUMN = np.array(KNOTS)
_SEED_COUNT = 4.0
"""Observations for which a measured cell counts."""
_UNKNOWN_EXTRA = 0.3
"""Time that a draft per row adds, relative to the rows alone, while nothing is known of the runner."""
_USUAL_CONTEXT = 256
"""Context of a row for which the cost of a prompt position is taken."""
_DELAY_RATE = 1 / 32
_FEWEST_DELAYS = 8
"""Steps with drafts after which they have a delay of their own."""
_UNDRAFTED_SAMPLE = 4
"""One of this many steps is observed while none has drafts."""
_MOST_NOTED = 64
"""Steps kept until a decision is made; the oldest are dropped."""


class VerifyTimes:
    """Times of decode steps with and without drafts, of one runner."""

    def __init__(
        self,
        decode_s: Callable[[int, int], float],
        position_s: Callable[[int], float],
        pads: bool,
        costs: Sequence[plan_pb2.StepCost],
        max_drafts: int = GRAPH_DRAFTS[-1],
    ) -> None:
        """`decode_s(rows, context)`: predicted seconds of a decode step, which never change; 0 if unknown yet.
        `position_s(context)`: those of one more position that reads `context` KV positions. `pads`: the runner is a
        GPU. `costs`: steps that it measured. `max_drafts`: the most drafts of a row."""
        self.pads = pads
        self._graphs = graph_drafts(max_drafts)
        self._decode_s, self._position_s = decode_s, position_s
        self._costs = [cost for cost in costs if cost.decode_rows and not cost.prompt_positions]
        self._table: RatioTable | None = None
        self._is_predicted = False
        self._rough_s = 0.0  # of the first decode step: the unit of the ratios while nothing is predicted
        self._verified_share = 1.0  # of the planned drafts
        self._delay_s, self._num_delays = [0.0, 0.0], [0, 0]  # of steps without and with drafts
        self._noted: deque[tuple[Any, int, int, int, float, float | None]] = deque(maxlen=_MOST_NOTED)
        self._ticks, self._drafted_last = 0, True

    # ------------------------------------------------------------------ what is read

    def charged(self, rows: int, drafts: float, most: int) -> float:
        """Returns how many drafts cost time in a step of `rows` rows with `drafts` in all, `most` of one row."""
        if not self.pads or not most:
            return drafts
        return rows * next((graph for graph in self._graphs if graph >= most), most)

    def curve(self, rows: int, context: int) -> npt.NDArray[np.float64]:
        """Returns the seconds of a step of `rows` rows with each of `KNOTS` drafts per row, float64 [knots]; they never
        decrease. If nothing is known, they are relative ones."""
        self._observe()
        table, base_s = self._table_and_base(rows, context)
        ratios, delay_s = table.ratios(rows), self._delay(True)
        least_s = ratios[0] * base_s + self._delay(False)
        seconds = [least_s]
        for ratio in ratios[1:]:
            least_s = max(least_s, ratio * base_s + delay_s)
            seconds.append(least_s)
        return np.array(seconds)

    def seconds(self, rows: int, drafts: float, context: int) -> float:
        """Returns the predicted seconds of a step whose drafts that cost time are `drafts` in all; 0 if nothing is
        known."""
        curve = self.curve(rows, context)
        return float(np.interp(drafts / max(1, rows), KNOTS_COLUMN, curve)) if self.known else 0.0

    def planned_s(self, starts: Any, counts: Any) -> float:
        """Returns the seconds of a planned step, whose rows verify at most count - 1 drafts each; 0 if nothing is
        known. Elsewhere than on a GPU, the drafter is assumed to have as many of them as usual."""
        rows = len(starts)
        planned = (int(np.add.reduce(counts)) - rows) * self._verified_share
        return self.seconds(rows, self.charged(rows, planned, int(counts.max()) - 1), int(np.add.reduce(starts)))

    @property
    def known(self) -> bool:
        """Whether its times are seconds; before, they are relative to those of other steps."""
        return self._is_predicted or self._rough_s > 0

    def knows_undrafted(self, rows: int) -> bool:
        """Whether steps of about `rows` rows without drafts were measured or observed, so that others can be compared
        with them."""
        self._observe()
        return self._table is not None and self.known and self._table.knows_undrafted(rows)

    def _delay(self, drafts: bool) -> float:
        return max(0.0, self._delay_s[drafts and self._num_delays[1] >= _FEWEST_DELAYS])

    def _table_and_base(self, rows: int, context: int) -> tuple[RatioTable, float]:
        """Returns the table, and the seconds of the rows alone to which its ratios refer; 1 if nothing is known."""
        seconds = self._decode_s(rows, context)
        if self._table is None or self._is_predicted is not (seconds > 0):
            self._is_predicted = seconds > 0
            self._table = self._new_table()
        return self._table, seconds or self._rough_s or 1.0

    # ------------------------------------------------------------------ observations

    def note(self, starts: Any, counts: Any, step_s: float, runner_s: float, waited: bool, drafted: Any) -> bool:
        """Notes a decode step; the arguments are those of `StepTimeModel.note`. Returns whether it was to verify
        drafts."""
        rows = len(starts)
        planned = int(np.add.reduce(counts)) - rows if drafted is not None else 0
        self._ticks += 1
        if not planned and self._ticks % _UNDRAFTED_SAMPLE and not self._drafted_last:
            return False
        self._drafted_last = planned > 0
        if runner_s > 0 or step_s > 0:
            delay_s = step_s - runner_s if runner_s > 0 and step_s > 0 and not waited else None
            verified = int(np.add.reduce(drafted)) if planned else 0
            most = int(counts.max()) - 1 if planned else 0
            self._noted.append((starts, planned, verified, most, runner_s or step_s, delay_s))
        return planned > 0

    def _observe(self) -> None:
        """Uses the noted steps."""
        while self._noted:
            starts, planned, verified, most, seconds, delay_s = self._noted.popleft()
            if planned:
                self._verified_share += (verified / planned - self._verified_share) * _DELAY_RATE
            rows = len(starts)
            drafts = self.charged(rows, verified, most)
            if not drafts and not self._rough_s:
                self._rough_s = seconds
            table, base_s = self._table_and_base(rows, int(np.add.reduce(starts)))
            if not self.known:
                continue  # there is no step without drafts to compare with
            if delay_s is not None:
                kind = drafts > 0
                self._num_delays[kind] += 1
                rate = max(1 / self._num_delays[kind], _DELAY_RATE)
                self._delay_s[kind] += rate * (max(-base_s, min(base_s, delay_s)) - self._delay_s[kind])
            table.correct(rows, drafts / max(1, rows), seconds / base_s)

    # ------------------------------------------------------------------ the start

    def _new_table(self) -> RatioTable:
        """Returns a table by the measured steps, or by the cost of a prompt position."""
        measured = self._measured() if self._is_predicted else {}
        if not measured:
            extras = [self._assumed_extra(1 << row) for row in range(NUM_ROWS)]
            return RatioTable([[1 + extra * knot for knot in KNOTS] for extra in extras], 0.0)
        places = sorted(measured)
        by_place = np.array([measured[place] for place in places])
        columns = [np.interp(range(NUM_ROWS), places, by_place[:, c]) for c in range(len(KNOTS))]
        return RatioTable(np.array(columns).T.tolist(), _SEED_COUNT)

    def _assumed_extra(self, rows: int) -> float:
        """Returns what a draft per row adds to the time of the rows, relative to it."""
        base_s, extra_s = self._decode_s(rows, rows * _USUAL_CONTEXT), rows * self._position_s(_USUAL_CONTEXT)
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
