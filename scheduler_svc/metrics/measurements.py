"""Measures latency and batches from applied results and ends, counted in bulk.

A result costs a step one append to a list. Every `BATCH` results, and at each snapshot, all new ones are counted at
once: a few numpy calls for thousands of tokens, made after a step's plans and tokens have been sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import attrgetter

import numpy as np

from scheduler_svc.metrics.draft_positions import DraftPositions
from scheduler_svc.metrics.histogram import (
    E2E_BUCKETS_S,
    ITL_BUCKETS_S,
    POSITION_BUCKETS,
    ROW_BUCKETS,
    STEP_BUCKETS_S,
    TTFT_BUCKETS_S,
    Histogram,
)
from scheduler_svc.model.sequence import FinishReason, Sequence
from scheduler_svc.plan.applied_result import AppliedResult

BATCH = 32
"""Results that are counted together. Until then they are kept in memory with their plans."""
_DECODE_ROWS = attrgetter("flight.decode_rows")


class Measurements:
    """Histograms of one engine. Used only by the engine's thread."""

    def __init__(self) -> None:
        self.ttft_s = Histogram(TTFT_BUCKETS_S)
        self.itl_s = Histogram(ITL_BUCKETS_S)
        self.e2e_s = Histogram(E2E_BUCKETS_S)
        self.step_s = Histogram(STEP_BUCKETS_S)
        self.step_rows = Histogram(ROW_BUCKETS)
        self.step_positions = Histogram(POSITION_BUCKETS)
        self.run_s = 0.0
        """Runner time spent in steps."""
        self.idle_s = 0.0
        """Runner time between a step's end and the next plan while no plan was in flight."""
        self.decode_rows = 0
        """Rows that decoded."""
        self.drafts = DraftPositions()
        self.ends: Counter[FinishReason] = Counter()
        self._results: list[AppliedResult] = []
        self._lifetimes_s: list[float] = []
        self._drafted: defaultdict[str, list[AppliedResult]] = defaultdict(list)

    def applied(self, applied: AppliedResult) -> None:
        """Records an applied result."""
        self._results.append(applied)

    def verified(self, drafter: str, applied: AppliedResult) -> None:
        """Records the drafts of an applied result whose plan had some."""
        self._drafted[drafter].append(applied)

    def ended(self, sequence: Sequence, reason: FinishReason, now_s: float) -> None:
        """Records an ended sequence; its duration is measured if it ended by STOP or LENGTH."""
        self.ends[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lifetimes_s.append(now_s - sequence.request.arrival_s)

    @property
    def due(self) -> bool:
        """Whether enough results have been recorded to be counted."""
        return len(self._results) >= BATCH

    def count(self) -> None:
        """Counts everything recorded since the last call."""
        results, self._results = self._results, []
        lifetimes_s, self._lifetimes_s = self._lifetimes_s, []
        if lifetimes_s:
            self.e2e_s.add(np.array(lifetimes_s))
        if not results:
            return
        times_s = np.array([applied.now_s for applied in results])
        tokens = np.array([len(applied.previous_at) for applied in results])
        previous_at = np.concatenate([applied.previous_at for applied in results])
        is_first = np.isnan(previous_at)
        self.itl_s.add((times_s.repeat(tokens) - previous_at)[~is_first])
        if is_first.any():
            having = np.searchsorted(tokens.cumsum(), is_first.nonzero()[0], side="right")
            # Not np.unique: its first call imports numpy.ma, which stalls all streams for tens of milliseconds.
            with_first = [results[index] for index in dict.fromkeys(having.tolist())]
            self.ttft_s.add(np.array([first_s for applied in with_first for first_s in _first_tokens_s(applied)]))
        steps_s = np.array([applied.step_s for applied in results])
        self._count_drafts()
        self.step_s.add(steps_s)
        self.run_s += float(steps_s.sum())
        self.idle_s += sum(applied.idle_s for applied in results)
        self.decode_rows += sum(map(_DECODE_ROWS, results))
        self.step_rows.add(np.array([len(applied.flight.sequences) for applied in results], np.float64))
        self.step_positions.add(np.array([applied.flight.positions for applied in results], np.float64))

    def _count_drafts(self) -> None:
        for drafter, results in self._drafted.items():
            drafted = np.concatenate([applied.drafted for applied in results if applied.drafted is not None])
            accepted = np.concatenate([applied.accepted for applied in results if applied.accepted is not None])
            self.drafts.add(drafter, drafted, accepted)
        self._drafted.clear()


def _first_tokens_s(applied: AppliedResult) -> list[float]:
    """Returns the seconds from arrival to first token for each first token in the result.

    A sequence adopted from a former scheduler has no previous token here either, but its first one came long ago.
    """
    flight, times_s = applied.flight, []
    for index in np.flatnonzero(np.isnan(applied.previous_at)).tolist():
        row = applied.rows[index]
        request = flight.sequences[row].request
        if flight.starts[row] + flight.counts[row] == request.prompt_len + request.num_received:
            times_s.append(applied.now_s - request.arrival_s)
    return times_s
