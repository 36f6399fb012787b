"""When the next plan of a runner is made: at once, or held back until shortly before the runner runs out of work.

Requests that arrive while a plan is held back still get into it. The time at which the runner runs out of work is
predicted from its plans in flight; how long before it the plan must be made is learned (`PlanLead`) or given.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.plan_lead import PlanLead
from scheduler_svc.step_times.step_time_model import StepTimeModel

_LATEST_S = 0.001
"""A held plan made later than this after its time was not delayed by the engine: there was nothing to plan."""
_GIVEN_MARGIN = 0.1
"""Share of the predicted time by which a plan with a given lead is made earlier: unlike a learned lead, a given one
leaves no room for the error of the prediction, which is below a tenth for most steps (docs/simulator.md)."""
_EARLIER = 2.0
"""Factor of the lead for plans beyond those made at once, which cost no request its place."""


@dataclass(frozen=True, slots=True)
class TimingRule:
    """How plans are timed, the same for all runners."""

    depth: int = 2
    """Maximum number of plans in flight."""
    at_once: int = 2
    """Number of plans in flight below which no plan needs a reason. Further ones are made only when the runner would
    otherwise run out of work."""
    lead_s: float | None = math.inf
    """Given lead in seconds, for all plans; None: the lead is learned."""
    late_share: float | None = None
    """With a learned lead, share of the plans that may be late; None: only plans beyond `at_once` are held back."""

    @property
    def holds(self) -> bool:
        """Whether any plan may be held back."""
        if self.lead_s is not None:
            return self.lead_s < math.inf
        return self.late_share is not None or self.depth > self.at_once


class _Hold(NamedTuple):
    """A plan that is held back."""

    due_at: float
    lead_s: float
    behind_prompts: bool
    """Whether the plans before it compute parts of prompts."""


class PlanTiming:
    """Times the plans of one runner."""

    def __init__(
        self, rule: TimingRule, in_flight: deque[InFlight], step_times: StepTimeModel, clock: Callable[[], float]
    ) -> None:
        """`in_flight` and `step_times` are the runner's, plans oldest first; `clock` returns seconds."""
        self._rule = rule
        self._in_flight = in_flight
        self._clock = clock
        self._step_times = step_times
        self._is_told = False  # the runner reports by how much plans were early
        self._lead = PlanLead(rule.late_share or 0.0)
        self.late_plans = 0
        """Plans that were held back and reached the runner after it had run out of work."""
        self._last_result_at = clock()  # before the first result: idle since it joined
        self._latest: _Hold | None = None  # of the latest `due_at`
        self._held: _Hold | None = None

    # ------------------------------------------------------------------ results

    def occupied(self, flight: InFlight, now_s: float) -> tuple[float, float]:
        """Returns the runner's time that the plan of a result at `now_s` took, and its idle time before it, in
        seconds. Called once per result."""
        last_s, self._last_result_at = self._last_result_at, now_s
        return now_s - max(flight.sent_at, last_s), max(0.0, flight.sent_at - last_s)

    def learn(self, flight: InFlight, step_s: float, early_s: float | None) -> None:
        """Learns from a plan that took `step_s` and was ready `early_s` before the one before it was done.

        `early_s`: None if the runner does not report it.
        """
        if not self._rule.holds:
            return
        seconds = step_s + min(0.0, early_s or 0.0)
        if seconds > 0 and flight.drafts is None:
            self._step_times.recent.record(flight.positions, flight.prefills, seconds)
        if early_s is None:
            return
        self._is_told = True
        if not math.isnan(flight.ahead_s):
            self._lead.note(flight.behind_prompts, flight.ahead_s - early_s)
            self.late_plans += flight.held and early_s < 0

    # ------------------------------------------------------------------ plans

    def due_at(self, full: bool) -> float:
        """Returns when to make the next plan; 0 if at once, infinity if not before the next result.

        `full`: no slot is free, so no request could join a plan that is held back.
        """
        rule, flights = self._rule, self._in_flight
        if not flights:
            return 0.0
        if rule.lead_s is not None:
            return 0.0 if rule.lead_s == math.inf else self._early_end_at() - rule.lead_s
        extra = len(flights) >= rule.at_once
        if not extra and (full or rule.late_share is None):
            return 0.0
        if not self._is_told:
            return math.inf if extra else 0.0
        end_at, behind_prompts = self._end_at(len(flights))
        lead_s = self._lead.seconds(behind_prompts)
        if end_at is None or lead_s == math.inf:
            return math.inf if extra else 0.0
        if rule.late_share is None:
            lead_s *= _EARLIER
        self._latest = _Hold(end_at - lead_s, lead_s, behind_prompts)
        return end_at - lead_s

    def hold(self) -> None:
        """Notes that the plan is held back until the latest `due_at`."""
        self._held = self._latest

    def planned(self, flight: InFlight) -> None:
        """Notes, on the plan just made, how far ahead of the runner it was."""
        if not self._is_told or self._rule.lead_s is not None:
            return
        held, self._held = self._held, None
        sent_at, ahead = flight.sent_at, len(self._in_flight) - 1
        if held is not None:
            since_s = sent_at - held.due_at
            if 0 <= since_s <= _LATEST_S or (not ahead and since_s < 0):
                flight.held, flight.ahead_s, flight.behind_prompts = True, held.lead_s, held.behind_prompts
                return
        if ahead:
            end_at, flight.behind_prompts = self._end_at(ahead)
            if end_at is not None and end_at > sent_at:
                flight.ahead_s = end_at - sent_at

    @property
    def leads_s(self) -> tuple[float, float]:
        """Leads in seconds of plans behind steps that decode only, and behind steps with prompts; infinity if
        unknown."""
        given_s = self._rule.lead_s
        return (self._lead.seconds(False), self._lead.seconds(True)) if given_s is None else (given_s, given_s)

    @property
    def next_result_at(self) -> float:
        """Predicted time of the next result; infinity if unknown."""
        if not self._in_flight:
            return math.inf
        end_at, _ = self._end_at(1)
        return math.inf if end_at is None else end_at

    @property
    def _begin_at(self) -> float:
        """When the runner began the oldest plan in flight."""
        return max(self._in_flight[0].sent_at, self._last_result_at)

    def _end_at(self, count: int) -> tuple[float | None, bool]:
        """Returns when the first `count` plans in flight are done, and whether they compute prompts."""
        end_at, prefills = self._begin_at, False
        for index in range(count):
            flight = self._in_flight[index]
            if not flight.expected_s:
                columns = flight.starts, flight.counts, flight.num_decode
                flight.expected_s = self._step_times.expected_s(*columns, flight.drafts is not None)
                if not flight.expected_s:
                    return None, False
            end_at += flight.expected_s
            prefills = prefills or flight.prefills
        return end_at, prefills

    def _early_end_at(self) -> float:
        """Returns when the plans in flight are done if they take a little less than predicted; 0 if unknown."""
        end_at, _ = self._end_at(len(self._in_flight))
        return 0.0 if end_at is None else end_at - _GIVEN_MARGIN * (end_at - self._begin_at)
