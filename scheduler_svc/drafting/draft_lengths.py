"""How many tokens each decoding row of a step drafts: asks the policy, by default for the most tokens a second.

Rows that should not draft now are probed: at most one step of `PROBE_EVERY` drafts one token of such a row, few rows at
a time (all at once where a step is one graph for all of its rows, as one more costs nothing). So a text that begins to
repeat itself is noticed. Probes take a hundredth of the time of decode steps at most, by the step-time model: each step
adds to an allowance that a probe spends. So a drafter that is always wrong costs the tries after which it is hopeless,
and that hundredth.

Between probes, while no row drafts, a step costs a few comparisons here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from roster_protos import plan_pb2
from scheduler_svc.drafting.acceptance import Acceptance
from scheduler_svc.drafting.draft_room import most_drafts
from scheduler_svc.drafting.gain_check import GainCheck
from scheduler_svc.drafting.planner import DraftPlanner
from scheduler_svc.drafting.step_rows import StepRows
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.plan.slot_table import IntColumn, SlotTable
from scheduler_svc.policy import Load, PolicyGuard, RequestView
from scheduler_svc.step_times.step_time_model import StepTimeModel

PROBE_EVERY = 50
"""Steps between two drafts of a row without hope."""
_PROBE_GROUPS = 8
"""Parts in which many rows are probed, so that a part comes every few steps."""
_PROBE_SHARE = 0.01
"""Share of the time of decode steps that probes may take."""
_MOST_ALLOWED = 2.0
"""Of the allowance, in decode steps, unless a single probe takes longer."""
_COMPARE_EVERY = 128
"""Steps with drafts between two without, with which they are compared: a machine may have become faster or slower."""
_KEEP = 1 - 1 / 64
"""Weight that the tokens of earlier steps keep with each step, in `usual`."""


class Drafting:
    """Decides the lengths of the drafts of one runner."""

    def __init__(
        self,
        hello: plan_pb2.Hello,
        table: SlotTable,
        step_times: StepTimeModel,
        view_of: Callable[[Sequence], RequestView],
    ) -> None:
        """`view_of` returns the view of a sequence's request."""
        self.max_drafts = hello.max_drafts
        """Most tokens that a row may draft; 0: the runner has no drafter."""
        self._table = table
        self._verifying = step_times.verifying
        self._view_of = view_of
        self._most = np.array(self.max_drafts, np.int32)
        if not self.max_drafts:
            return
        self._acceptance = Acceptance(table.num_slots)
        self._planner = DraftPlanner(self.max_drafts, self._verifying.pads)
        self._asked_at = np.zeros(table.num_slots, np.int64)  # plan in which each slot's row drafted last
        self._gains = GainCheck()
        self._undrafted_at = 0  # last plan without drafts
        self._drafting = False  # the last decision was to draft, probes aside
        self._decided = (-1, -1)  # changes of averages and table at the last decision
        self._look_at = 0  # plan from which a probe may be due
        self._allowance, self._most_allowed, self._allowed_at = 0.0, _MOST_ALLOWED, 0
        self._gained, self._charged, self._gained_at = 0.0, 0.0, 0  # each row's, on average

    def usual(self, last_plan: int) -> tuple[float, float]:
        """Returns the tokens that a decoding row gains in a step, and its drafts that cost time, on average over the
        last steps."""
        if not self.max_drafts:
            return 1.0, 0.0
        faded = _KEEP ** (last_plan - self._gained_at)
        return 1 + self._gained * faded, self._charged * faded

    def described(self, load: Load, last_plan: int) -> Load:
        """Returns the load with what drafts usually gain."""
        tokens, drafts = self.usual(last_plan)
        return load._replace(tokens_per_row=tokens, drafts_per_row=drafts)

    def wants(self, last_plan: int, policy: PolicyGuard) -> bool:
        """Returns whether the plan after this one may draft; if not, it may follow from the last one."""
        if not self.max_drafts:
            return False
        if self._drafting or last_plan >= self._look_at or policy.sets_drafts:
            return True
        return self._decided != (self._acceptance.changes, self._table.changes)

    def lengths(
        self,
        decode: IntColumn,
        last_plan: int,
        load: Callable[[], Load],
        policy: PolicyGuard,
        service_itl_target_s: float | None = None,
    ) -> Column | None:
        """Returns how many tokens each of the slots `decode` drafts, int32 [R], or None if none does.

        `load`: returns the load for the policy; only called if it sets the drafts. `service_itl_target_s`: as there.
        """
        if not self.wants(last_plan, policy):
            return None
        table = self._table
        fresh = self._acceptance.begin(decode, table.epoch[decode])
        if len(fresh):
            self._asked_at[fresh] = last_plan - PROBE_EVERY
            self._look_at = min(self._look_at, last_plan)
        self._decided = self._acceptance.changes, table.changes
        most = most_drafts(table, decode, self._most)
        if not np.count_nonzero(most):
            self._drafting, self._look_at = False, last_plan + PROBE_EVERY
            return None
        rows = self._rows(decode, most, last_plan)
        if policy.sets_drafts:
            drafts = policy.drafts(load(), rows.protect())
        else:
            itl_target_s = float(table.itl_target_s[decode].min()) if table.num_itl_targets else math.inf
            drafts = rows.best_within(min(itl_target_s, service_itl_target_s or math.inf))
        return drafts if self._note_decision(decode, rows, drafts, last_plan) else None

    def _rows(self, decode: IntColumn, most: Column, last_plan: int) -> StepRows:
        if not self._drafting:
            self._undrafted_at = last_plan
        overdue = last_plan - self._undrafted_at >= _COMPARE_EVERY
        context = int(np.add.reduce(self._table.planned[decode]))
        curve = self._verifying.curve(len(decode), context)
        return StepRows(
            acceptance=self._acceptance.of(decode),
            most=most,
            hopeless=self._acceptance.hopeless(decode),
            share=self._acceptance.share_of(decode),
            waited=last_plan - self._asked_at[decode] if last_plan >= self._look_at else None,
            curve=curve,
            planner=self._planner,
            verifying=self._verifying,
            drafting=self._drafting,
            compares=overdue or not self._verifying.knows_undrafted(len(decode)),
            trust=self._gains.trust,
            allowance=self._allow(last_plan),
            probe_after=PROBE_EVERY,
            most_probes=max(4, len(decode) // _PROBE_GROUPS),
            request_of=lambda row: self._view_of(self._table.at(int(decode[row]))),
        )

    def _allow(self, last_plan: int) -> float:
        """Returns the allowance of probes, in decode steps."""
        grown = self._allowance + _PROBE_SHARE * (last_plan - self._allowed_at)
        self._allowance = min(grown, self._most_allowed)
        self._allowed_at = last_plan
        return self._allowance

    def _note_decision(self, decode: IntColumn, rows: StepRows, drafts: Column, last_plan: int) -> bool:
        """Notes which rows draft, what that costs the allowance, and when the next probe may be due; returns whether
        any row drafts."""
        asked, probed = drafts > 0, 0
        count = int(np.count_nonzero(asked))
        if count:
            self._asked_at[decode if count == len(decode) else decode[asked]] = last_plan
            if len(rows.probes) and asked[rows.probes].any():
                probed = len(rows.probes)
                self._allowance -= rows.probe_cost
        else:
            self._undrafted_at = last_plan
        self._drafting = count > probed or rows.compares
        self._gains.planned(last_plan + 1, drafts, rows.expected)
        if last_plan >= self._look_at:
            self._look_at = self._next_look(decode, rows, last_plan)
        return count > 0

    def _next_look(self, decode: IntColumn, rows: StepRows, last_plan: int) -> int:
        """Returns the plan from which the next probe may be due."""
        if rows.denied_cost:
            self._most_allowed = max(_MOST_ALLOWED, rows.denied_cost)
            missing = rows.denied_cost - self._allowance
            return last_plan + max(1, min(PROBE_EVERY, math.ceil(missing / _PROBE_SHARE)))
        due_at = int(self._asked_at[decode[rows.most > 0]].min()) + PROBE_EVERY
        return max(due_at, last_plan + PROBE_EVERY // _PROBE_GROUPS)

    def applied(self, applied: AppliedResult) -> None:
        """Learns from the result of a plan that drafted; sequences that ended are still in their slots."""
        flight, drafted, accepted = applied.flight, applied.drafted, applied.accepted
        asked = flight.drafts
        if asked is None or drafted is None or accepted is None:
            return
        num_drafted, num_accepted = int(np.add.reduce(drafted)), int(np.add.reduce(accepted))
        self._gains.learn(flight.number, flight.num_drafts, num_accepted)
        self._acceptance.note(flight.number, flight.slots, flight.epochs, asked, drafted, accepted)
        hopeful = ((asked == 1) & (accepted == 1)).nonzero()[0]
        if len(hopeful):  # a probe was right: it is repeated at once
            self._asked_at[flight.slots[hopeful]] -= PROBE_EVERY
            self._look_at = 0
        rows, faded = max(1, flight.num_decode), _KEEP ** (flight.number - self._gained_at)
        charged = self._verifying.charged(rows, num_drafted, int(asked.max()))
        self._gained = self._gained * faded + (1 - _KEEP) * num_accepted / rows
        self._charged = self._charged * faded + (1 - _KEEP) * charged / rows
        self._gained_at = flight.number
