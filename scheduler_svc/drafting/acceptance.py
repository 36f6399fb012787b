"""How often drafted tokens are accepted: for each slot, for the runner as a whole, and by position for observers.

*Acceptance* is the probability that a draft is accepted if those before it were. A row that verified d drafts and
accepted a of them says so min(a + 1, d) times: drafts behind the first wrong one were not tried. What a row says fades
with its further results, and is joined by a few tries at the runner's mean, so that a fresh row is as good as the
runner's fresh rows usually are.

A row that was asked for drafts and had none says nothing about acceptance. The share of the asked drafts that a row
really had is an average of its own, over its last few results: proposals come and go with the text, and a drafter
without one costs little but gains nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]

_KEEP = 0.9
"""Weight that a row's earlier results keep with each result: a text that begins to quote shows within ten."""
_SHARE_RATE = 0.5
"""Weight of a result in a row's share."""
_ASSUMED_TRIES = 2.0
"""Tries at the runner's mean that are added to those of a row."""
_FIRST_ACCEPTANCE, _FIRST_SHARE = 0.5, 0.8
"""Means of a runner before its first result."""
_FIRST_WEIGHT = 8.0
"""Tries, or asked drafts, for which these count."""
_MEAN_MEMORY = 64.0
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


class DraftTotals:
    """Counts of drafts since the runner joined, for observers."""

    def __init__(self, max_drafts: int) -> None:
        self.drafted = self.accepted = 0
        """Verified and accepted drafts."""
        self.rows = 0
        """Rows that verified any."""
        self.silent_rows = 0
        """Rows that were asked for drafts and had none."""
        self.drafted_at, self.accepted_at = (np.zeros(max_drafts, np.int64) for _ in range(2))
        """The same by position in the run, from 0: int64 [max_drafts]."""

    def add(self, drafted: Counts, accepted: Counts) -> None:
        """Adds rows that were asked for drafts."""
        most = len(self.drafted_at)
        at, accepted_at = (np.bincount(column, minlength=most + 1)[: most + 1] for column in (drafted, accepted))
        self.drafted_at += at[::-1].cumsum()[-2::-1]  # a row with d drafts has one at each position below d
        self.accepted_at += accepted_at[::-1].cumsum()[-2::-1]
        self.drafted += int(np.add.reduce(drafted))
        self.accepted += int(np.add.reduce(accepted))
        self.silent_rows += int(at[0])
        self.rows += len(drafted) - int(at[0])


class Acceptance:
    """Acceptance of one runner's drafts, in columns by slot."""

    def __init__(self, num_slots: int, max_drafts: int) -> None:
        self.totals = DraftTotals(max_drafts)
        self.changes = 0
        """Number of results that changed an average."""
        self._epoch = np.zeros(num_slots, np.int64)
        self._tries, self._hits, self._share = (np.zeros(num_slots) for _ in range(3))
        self._mean, self._mean_share = RunningMean(_FIRST_ACCEPTANCE), RunningMean(_FIRST_SHARE)

    def begin(self, slots: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Forgets what was known of those slots whose epoch has changed, and returns them."""
        if self._epoch[slots].tobytes() == epochs.tobytes():
            return slots[:0]
        fresh = slots[self._epoch[slots] != epochs]
        self._epoch[slots] = epochs
        self._tries[fresh] = self._hits[fresh] = 0.0
        self._share[fresh] = self._mean_share.value
        return fresh

    def of(self, slots: npt.NDArray[np.int64]) -> Numbers:
        """Returns the acceptance of each slot's row, float64 [R] in 0 to 1."""
        return (self._hits[slots] + _ASSUMED_TRIES * self._mean.value) / (self._tries[slots] + _ASSUMED_TRIES)

    def share_of(self, slots: npt.NDArray[np.int64]) -> Numbers:
        """Returns the share of the asked drafts that each slot's row usually has, float64 [R] in 0 to 1."""
        return self._share[slots]

    def note(
        self,
        slots: npt.NDArray[np.int64],
        epochs: npt.NDArray[np.int64],
        asked: Counts,
        drafted: Counts,
        accepted: Counts,
    ) -> None:
        """Records a result, row by row: `asked` drafts were planned, `drafted` verified and `accepted` accepted.

        Rows whose slot now has another epoch count for the runner only.
        """
        if not np.all(asked):
            wanted = asked.nonzero()[0]
            if not len(wanted):
                return
            columns = slots[wanted], epochs[wanted], asked[wanted], drafted[wanted], accepted[wanted]
            slots, epochs, asked, drafted, accepted = columns
        accepted = np.minimum(np.maximum(accepted, 0), drafted)
        self.changes += 1
        self.totals.add(drafted, accepted)
        tries = np.minimum(accepted + 1, drafted)
        known = self._tries[slots]
        self._learn_means(known, tries, accepted, asked, drafted)
        if self._epoch[slots].tobytes() != epochs.tobytes():
            live = self._epoch[slots] == epochs
            slots, known = slots[live], known[live]
            tries, accepted, asked, drafted = tries[live], accepted[live], asked[live], drafted[live]
        keep = np.where(drafted > 0, _KEEP, 1.0)
        self._tries[slots] = known * keep + tries
        self._hits[slots] = self._hits[slots] * keep + accepted
        share = self._share[slots]
        self._share[slots] = share + _SHARE_RATE * (drafted / asked - share)

    def _learn_means(self, known: Numbers, tries: Counts, accepted: Counts, asked: Counts, drafted: Counts) -> None:
        """Adds a result to the runner's means, in which a row's first tries count most: they describe fresh rows."""
        weights = _ASSUMED_TRIES / (known + _ASSUMED_TRIES)
        self._mean.add(float(weights @ accepted), float(weights @ tries))
        self._mean_share.add(float(weights @ drafted), float(weights @ asked))
