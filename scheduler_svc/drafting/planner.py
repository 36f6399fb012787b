"""The numbers of drafts with which a decode step has the most tokens a second.

A row that drafts k tokens gains share * (p + p^2 + ... + p^k) tokens: p is its acceptance, and share the part of the
asked drafts that its drafter usually has. If the rows of a step take all drafts whose marginal gain p^j is at least
some threshold, no other choice of as many drafts gains more. So a decision compares `_THRESHOLDS`: what their drafts
gain, and what they cost by the step-time model. The best one has the most tokens a second of the whole step; none is
taken where all lose. Where a step is one graph for all of its rows, the first row's drafts make those of the others
free, so there one number for all rows is chosen.

Rows are counted by acceptance in `_LEVELS` classes and by their maximum, so that a decision is two products of these
counts with constant matrices, and takes about as long for 256 rows as for a few.
"""

from __future__ import annotations

import math

import numpy as np

from roster_common.link_protocol import graph_drafts
from scheduler_svc.drafting.acceptance import Numbers
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.step_times.verify_times import KNOTS_COLUMN

_LEVELS = 24
_THRESHOLDS = 0.98 * np.array([*0.97 ** np.arange(14), *0.97**13 * 0.9 ** np.arange(1, 27)])
"""Closer where rows that accept nearly everything differ. Down to 0.04: less than what a draft costs anywhere."""
_LEAST_GAIN = 1.01
"""Tokens a second, relative to none drafted, from which drafts are worth it. What is behind the estimates is not
exact, and a step with drafts is a little more work for the scheduler."""
_STAY_GAIN = 1.005
"""The same while the last step had drafts, so that the decision does not alternate."""


class DraftPlanner:
    """Decides for one runner."""

    def __init__(self, max_drafts: int, pads: bool) -> None:
        """`pads`: a step is one graph for all of its rows (`VerifyTimes.pads`)."""
        self._pads = pads
        self._width = max_drafts + 1
        acceptance = (np.arange(_LEVELS) + 0.5) / _LEVELS
        drafts = np.log(_THRESHOLDS)[:, None] / np.log(acceptance)  # with a marginal gain at or above the threshold
        self._drafts = np.minimum(drafts, max_drafts).astype(np.int32)  # [thresholds, levels]
        gains = np.zeros((_LEVELS, self._width))  # of a row of each level with each number of drafts
        gains[:, 1:] = (acceptance[:, None] ** np.arange(1, self._width)).cumsum(1)
        taken = np.minimum(self._drafts[:, :, None], np.arange(self._width))  # [thresholds, levels, maximum of the row]
        taken_gains = gains[np.arange(_LEVELS)[:, None], taken]
        both = np.concatenate((taken_gains, taken)).reshape(2 * len(_THRESHOLDS), -1)
        self._gains_and_taken = both.astype(np.float64)  # the gains of all thresholds, then the drafts
        graphs = graph_drafts(max_drafts)
        self._graphs = np.array(graphs)
        by_graph = np.minimum(self._graphs[:, None], np.arange(self._width))  # [graphs, maximum of the row]
        self._graph_gains = gains[:, by_graph].transpose(1, 0, 2).copy()
        self._graph_gains[:, 0] = 0.0
        self._graph_gains = self._graph_gains.reshape(len(graphs), -1)

    def best(
        self,
        acceptance: Numbers,
        share: Numbers,
        most: Column,
        curve: Numbers,
        limit_s: float = math.inf,
        drafting: bool = False,
        trust: float = 1.0,
    ) -> tuple[Column | None, float]:
        """Returns the drafts of each row, int32 [R], or None if none is best, and the tokens that they should gain.

        `acceptance`, `share`: float64 [R]. `most`: maximum number of each row, int32 [R]. `curve`: seconds of the step
        with each of `KNOTS` drafts per row (`VerifyTimes.curve`). `limit_s`: maximum time of the step, unless it takes
        longer without drafts. `drafting`: the last step had drafts. `trust`: what drafts really gained lately, relative
        to what they should have; the gains here are without it.
        """
        rows, width = len(most), self._width
        levels = (acceptance * (_LEVELS - 1e-9)).astype(np.intp)
        places = levels * width
        places += most
        counts = np.bincount(places, share, _LEVELS * width)
        worth = (_STAY_GAIN if drafting else _LEAST_GAIN) * rows / curve[0]
        if self._pads:
            gains, each = self._graph_gains.dot(counts), self._graphs
        else:
            both = self._gains_and_taken.dot(counts)
            gains, each = both[: len(_THRESHOLDS)], both[len(_THRESHOLDS) :] / rows
        seconds = np.interp(each, KNOTS_COLUMN, curve)
        rates = (trust * gains + rows) / seconds
        if curve[0] < limit_s < math.inf:
            rates[seconds > limit_s] = 0.0
        index = int(rates.argmax())
        if rates[index] <= worth:
            return None, 0.0
        if not self._pads:
            return np.minimum(self._drafts[index][levels], most), float(gains[index])
        drafts: Column = np.minimum(most, np.int32(self._graphs[index]))
        drafts[levels == 0] = 0
        return drafts, float(gains[index])
