"""How often drafted tokens are accepted: by the row in each slot, and by the runner's rows on average.

*Acceptance* is the probability that a draft is accepted if those before it were. A row that verified d drafts and
accepted a of them says so min(a + 1, d) times: drafts behind the first wrong one were not tried. What a row says fades
with its further results, and is joined by a few tries at the runner's mean, so that a fresh row is as good as the
runner's fresh rows usually are. How many they are is learned: many if the rows are alike, few if some accept nearly all
and others nothing.

A row is *hopeless* while none of its last `HOPELESS_AFTER` results with drafts had an accepted one. Its acceptance is
not that low: the runner's mean is part of it, and few tries tell it from one that gains. But drafts that cost no time,
as those of a graph that verifies other rows, would go on for ever for the least acceptance.

A row that was asked for drafts and had none says nothing about acceptance. The share of the asked drafts that a row
really had is an average of its own, over its last few results: proposals come and go with the text, and a drafter
without one costs little but gains nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_svc.plan.slot_table import run_of

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]

HOPELESS_AFTER = 50
"""Results with drafts, none accepted, after which a row is hopeless. At an acceptance of 0.1 it is so once in 2,000."""
_KEEP = 0.94
"""Weight that a row's earlier results keep with each result: about 16 count."""
_LONG_AGO, _STALE = 16, 0.7
"""Plans after which they are stale, and the weight that they keep then: the text has changed since."""
_SHARE_RATE = 0.5
"""Weight of a result in a row's share."""
_ASSUMED_TRIES = 3.0
"""Tries at the runner's mean that are added to those of a row, before it is known how much the rows differ."""
_FEWEST_ASSUMED, _MOST_ASSUMED = 0.5, 4.0
_ONE = np.array(1, np.int32)
_FIRST_ACCEPTANCE, _FIRST_SHARE = 0.5, 0.8
"""Means of a runner before its first result."""
_FIRST_WEIGHT = 2.0
"""Tries, or asked drafts, for which these count."""
_FEWEST_PAIRS = 8.0
"""Rows with earlier and next drafts from which it is known how much rows differ."""
_MEAN_MEMORY = 128.0
"""Tries over which a runner's mean is taken."""


class RunningMean:
    """Ratio of two sums, of which the later summands count more."""

    def __init__(self, value: float) -> None:
        self._part, self._whole = value * _FIRST_WEIGHT, _FIRST_WEIGHT

    @property
    def value(self) -> float:
        """The ratio."""
        return self._part / self._whole

    def add(self, part: float, whole: float) -> None:
        """Adds to both sums. They fade by what is added, to about `_MEAN_MEMORY`."""
        keep = _MEAN_MEMORY / (_MEAN_MEMORY + whole)
        self._part = self._part * keep + part
        self._whole = self._whole * keep + whole


class Likeness:
    """How alike the rows of a runner are: the tries for which their mean should count in the average of one of them.

    If every row had the same acceptance, what a row did before would say nothing about its next draft. The covariance
    of the two is the variance of the rows' acceptances; with it, the weight is that of a beta distribution of the same
    mean and variance.
    """

    def __init__(self) -> None:
        self.assumed_tries = _ASSUMED_TRIES
        self._pairs = self._before = self._next = self._both = 0.0

    def add(self, before: Numbers, accepted: npt.NDArray[np.bool_]) -> None:
        """Adds rows: the part of their earlier drafts that was accepted, and whether the first of the next ones was."""
        keep = _MEAN_MEMORY / (_MEAN_MEMORY + len(before))
        self._pairs = self._pairs * keep + len(before)
        self._before = self._before * keep + float(np.add.reduce(before))
        self._next = self._next * keep + int(np.count_nonzero(accepted))
        self._both = self._both * keep + float(before.dot(accepted))
        if self._pairs < _FEWEST_PAIRS:
            return
        before_mean, mean = self._before / self._pairs, self._next / self._pairs
        variance = self._both / self._pairs - before_mean * mean
        weight = mean * (1 - mean) / variance - 1 if variance > 1e-6 else _MOST_ASSUMED
        self.assumed_tries = min(_MOST_ASSUMED, max(_FEWEST_ASSUMED, weight))


class Acceptance:
    """Acceptance of one runner's drafts, in columns by slot."""

    def __init__(self, num_slots: int) -> None:
        self.changes = 0
        """Number of results that changed an average."""
        self._epoch, self._noted_at, self._missed = (np.zeros(num_slots, np.int64) for _ in range(3))
        self._tries, self._hits, self._share = (np.zeros(num_slots) for _ in range(3))
        self._mean, self._mean_share = RunningMean(_FIRST_ACCEPTANCE), RunningMean(_FIRST_SHARE)
        self._likeness = Likeness()

    def begin(self, slots: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Forgets what was known of those slots whose epoch has changed, and returns them."""
        if self._epoch[slots].tobytes() == epochs.tobytes():
            return slots[:0]
        fresh = slots[self._epoch[slots] != epochs]
        self._epoch[slots] = epochs
        self._tries[fresh] = self._hits[fresh] = self._missed[fresh] = 0
        self._share[fresh] = self._mean_share.value
        return fresh

    def of(self, slots: npt.NDArray[np.int64]) -> Numbers:
        """Returns the acceptance of each slot's row, float64 [R] in 0 to 1."""
        assumed = self._likeness.assumed_tries
        return (self._hits[slots] + assumed * self._mean.value) / (self._tries[slots] + assumed)

    def hopeless(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Returns whether each slot's row is hopeless, bool [R]."""
        return self._missed[slots] >= HOPELESS_AFTER

    def share_of(self, slots: npt.NDArray[np.int64]) -> Numbers:
        """Returns the share of the asked drafts that each slot's row usually has, float64 [R] in 0 to 1."""
        return self._share[slots]

    def note(
        self,
        number: int,
        slots: npt.NDArray[np.int64],
        epochs: npt.NDArray[np.int64],
        asked: Counts,
        drafted: Counts,
        accepted: Counts,
    ) -> None:
        """Records the result of a plan, row by row: `asked` drafts were planned, `drafted` verified, and `accepted`
        accepted. Rows whose slot now has another epoch are ignored.
        """
        if np.count_nonzero(asked) < len(asked) or self._epoch[slots].tobytes() != epochs.tobytes():
            counted = ((asked > 0) & (self._epoch[slots] == epochs)).nonzero()[0]
            if not len(counted):
                return
            slots, asked, drafted, accepted = slots[counted], asked[counted], drafted[counted], accepted[counted]
        self.changes += 1
        where = run_of(slots)
        tries, known, hits = np.minimum(accepted + _ONE, drafted), self._tries[where], self._hits[where]
        self._learn_means(known, hits, tries, asked, drafted, accepted)
        is_stale, self._noted_at[where] = self._noted_at[where] < number - _LONG_AGO, number
        keep: Numbers | float = _KEEP
        if b"\1" in is_stale.tobytes() or np.count_nonzero(drafted) < len(drafted):
            keep = np.where(drafted > 0, _KEEP, 1.0)
            keep[is_stale] = _STALE
        self._tries[where] = known * keep + tries
        self._hits[where] = hits * keep + accepted
        self._missed[where] = (self._missed[where] + (drafted > 0)) * (accepted == 0)
        share = self._share[where]
        self._share[where] = share + _SHARE_RATE * (drafted / asked - share)

    def _learn_means(
        self, known: Numbers, hits: Numbers, tries: Counts, asked: Counts, drafted: Counts, accepted: Counts
    ) -> None:
        """Adds a result to the runner's means, in which a row's first tries count most: they describe fresh rows."""
        weights = _ASSUMED_TRIES / (known + _ASSUMED_TRIES)
        self._mean.add(float(weights.dot(accepted)), float(weights.dot(tries)))
        self._mean_share.add(float(weights.dot(drafted)), float(weights.dot(asked)))
        tells = (known >= 1) & (drafted > 0)
        if b"\0" not in tells.tobytes():
            self._likeness.add(hits / known, accepted > 0)
        elif len(told := tells.nonzero()[0]):
            self._likeness.add(hits[told] / known[told], accepted[told] > 0)
