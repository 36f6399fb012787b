"""The rows of one step that may draft, as policies see them, and the default's answer for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.drafting.acceptance import Numbers
from scheduler_svc.drafting.planner import DraftPlanner
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.policy import Drafts, Load, RequestView
from scheduler_svc.step_times.verify_times import KNOTS_COLUMN, VerifyTimes

_NO_PROBES = np.zeros(0, np.intp)


@dataclass(slots=True)
class StepRows:
    """The decoding rows of a step (`DraftRows`)."""

    acceptance: Numbers
    most: Column
    hopeless: npt.NDArray[np.bool_]
    """Rows that draft only as probes."""
    share: Numbers
    """Share of the asked drafts that each row's drafter usually has."""
    waited: npt.NDArray[np.int64] | None
    """Plans since each row drafted last; None if this step probes none."""
    curve: Numbers
    """Seconds of the step with each of `KNOTS` drafts per row."""
    planner: DraftPlanner
    verifying: VerifyTimes
    drafting: bool
    """Whether the last step drafted."""
    compares: bool
    """Whether this step is to have no drafts, so that times of steps with and without them can be compared."""
    trust: float
    """As `DraftPlanner.best` takes it."""
    allowance: float
    """What probes may cost, in decode steps."""
    probe_after: int
    """Plans without a draft after which a row may be probed."""
    most_probes: int
    request_of: Callable[[int], RequestView]
    expected: float = 0.0
    """Tokens that the drafts of `best` should gain, probes aside."""
    probes: npt.NDArray[np.intp] = field(default_factory=lambda: _NO_PROBES)
    """Rows that `best` probes."""
    probe_cost: float = 0.0
    """What they cost, in decode steps."""
    denied_cost: float = 0.0
    """What a probe would cost that the allowance does not suffice for."""

    def protect(self) -> StepRows:
        """Makes what policies see read-only."""
        self.acceptance.setflags(write=False)
        self.most.setflags(write=False)
        return self

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.most)

    def request(self, row: int) -> RequestView:
        """Returns the row's request."""
        return self.request_of(row)

    def seconds(self, drafts: Drafts) -> float:
        """Returns the predicted time of the step with these numbers of drafts, in seconds; 0 if nothing is known."""
        if not self.verifying.known:
            return 0.0
        return self._seconds(np.asarray(drafts))

    def best(self, load: Load) -> Column:
        """Returns the numbers with the most tokens a second, and 1 for rows that are probed."""
        return self.best_within(min(load.itl_target_s, load.service_itl_target_s or math.inf))

    def best_within(self, limit_s: float) -> Column:
        """Returns `best` for this ITL target in seconds."""
        if self.compares:
            return np.zeros(len(self.most), np.int32)
        columns = self.acceptance, self.share, self.most * ~self.hopeless
        drafts, self.expected = self.planner.best(*columns, self.curve, limit_s, self.drafting, self.trust)
        if drafts is None:
            drafts = np.zeros(len(self.most), np.int32)
        if self.waited is not None:
            self._add_probes(drafts)
        return drafts

    def _add_probes(self, drafts: Column) -> None:
        """Adds a draft to rows that have had none for long, as far as the allowance suffices."""
        waited = self.waited
        if waited is None:
            return
        due = ((waited >= self.probe_after) & (drafts == 0) & (self.most > 0)).nonzero()[0]
        if not len(due):
            return
        pads = self.verifying.pads
        if len(due) > self.most_probes and not pads:
            due = due[np.argsort(-waited[due], kind="stable")[: self.most_probes]]
        before_s = self._seconds(drafts)
        while True:
            drafts[due] = 1
            cost = (self._seconds(drafts) - before_s) / self.curve[0]
            if cost <= self.allowance:
                self.probes, self.probe_cost = due, cost
                return
            drafts[due] = 0
            if len(due) == 1 or pads:
                self.denied_cost = cost
                return
            due = due[: len(due) // 2]

    def _seconds(self, drafts: npt.NDArray[np.integer]) -> float:
        """Returns the predicted seconds, relative ones if nothing is known."""
        rows, verifying = len(self.most), self.verifying
        total = float(drafts @ (self.share if not verifying.pads else np.ones(rows)))
        charged = verifying.charged(rows, total, int(drafts.max(initial=0)))
        return float(np.interp(charged / max(1, rows), KNOTS_COLUMN, self.curve))
