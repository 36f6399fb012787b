"""Scheduler of one runner: its slots, block pool and plans in flight.

`apply` takes a result. `plan` builds the next step: decoding rows first (preempting if blocks run out), then prompts
under way, then waiting sequences. There is no prefill phase: every sequence catches up on its lag within the step's
budget. Plan N+1 is built while the runner executes plan N. Results therefore refer to rows, and a row whose sequence
has since left its slot changes no counter.

A sequence is admitted with the blocks of all its known tokens, so only decoding rows allocate further blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from roster_common.link_protocol import FORCED
from roster_protos import plan_pb2
from scheduler_svc.drafting.draft_lengths import Drafting
from scheduler_svc.drafting.draft_room import lengths_within
from scheduler_svc.kv.block_pool import BlockPool, most_tokens
from scheduler_svc.kv.naming_secret import NamingSecret
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.applied_result import AppliedResult, apply_rows
from scheduler_svc.plan.awaiting import better_together, mark_awaiting
from scheduler_svc.plan.drafted_result import apply_runs
from scheduler_svc.plan.plan_builder import PlanBuilder, PlannedStep
from scheduler_svc.plan.plan_draft import PlanDraft
from scheduler_svc.plan.plan_timing import PlanTiming, TimingRule
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import Budget, Load, PolicyGuard, RequestView
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.queue.waiting_queue import WaitingQueue
from scheduler_svc.scheduler.admission import Admission
from scheduler_svc.scheduler.arrivals import RunnerMoves, admit_arrivals
from scheduler_svc.scheduler.departures import Departures
from scheduler_svc.scheduler.displacing import Displacing
from scheduler_svc.scheduler.policy_views import load_view, request_view
from scheduler_svc.scheduler.prefix_cache import PrefixCache, SharingRules
from scheduler_svc.scheduler.retention import HintLimits, Retention
from scheduler_svc.scheduler.running_rows import RunningRows
from scheduler_svc.scheduler.step_budget import StepBudget
from scheduler_svc.scheduler.swapping import Swapping
from scheduler_svc.step_times.step_time_model import StepTimeModel
from scheduler_svc.tiers.tiers import Tiers

_ONE = np.array(1, np.int32)
"""Comparing with an array is cheaper than comparing with a Python number."""


class BadResult(ValueError):
    """A result that does not match the oldest plan in flight; the runner must start a new session."""


class Scheduler:
    """Schedules every step of one runner. Not thread-safe: only the engine's thread may use it."""

    def __init__(
        self,
        hello: plan_pb2.Hello,
        *,
        sharing: SharingRules = SharingRules(),  # noqa: B008  (frozen)
        clock: Callable[[], float] = lambda: 0.0,
        ledger: Ledger | None = None,
        rule: TimingRule = TimingRule(),  # noqa: B008  (frozen)
        forces: bool = True,
        secret: NamingSecret | None = None,
        retention: PolicyGuard | None = None,
        hints: HintLimits = HintLimits(),  # noqa: B008  (frozen)
    ) -> None:
        """`forces`: whether plans append forced tokens, if the runner can. `secret`: with which blocks are named, the
        same for all runners of a service; None: one of its own. `retention`: the policy that decides what the prefix
        cache keeps, None for the blocks used last; `hints`: limits of what clients tell it."""
        self.hello = hello
        self.depth = min(rule.depth, hello.max_depth or 1)
        """Maximum number of plans in flight."""
        self.most_tokens = most_tokens(hello)
        """Maximum number of tokens, prompt and output, of a sequence on this runner."""
        self.table = SlotTable(hello.num_slots)
        self.pool = BlockPool(hello.num_blocks, hello.block_size)
        self.step_times = StepTimeModel.of(hello)
        """How long this runner's steps take."""
        self.tiers = Tiers(hello, self.pool, self.step_times, clock) if hello.num_host_blocks else None
        """The runner's host pool; None if it has none."""
        self.prefix = PrefixCache(self.pool, hello.model, sharing, secret or NamingSecret(), self.tiers)
        self.plans = PlanBuilder(self.table, self.pool, clock)
        self.in_flight = self.plans.in_flight
        self._begin_counts()
        self._max_step_tokens = hello.max_step_tokens
        self._clock = clock
        self.ledger = ledger or Ledger()
        self.timing = PlanTiming(rule, self.in_flight, self.step_times, clock)
        self.admission = Admission(self, self.table, self.pool, self.prefix, self.ledger, self.most_tokens, self.tiers)
        self.retention = Retention(self.pool, self.ledger, self._retention_load, retention, hints, self.tiers)
        """Decides what the prefix cache keeps."""
        self.moves = RunnerMoves(self.pool)
        self.departures = Departures(self.table, self.prefix, self.plans, self.retention, self.moves)
        self._divide()
        self.drafting = Drafting(hello, self.table, self.step_times, _view_of)
        """Decides how many tokens the rows draft."""
        self.table.drafts = self.drafting.max_drafts > 0
        self.forces = forces and FORCED in hello.features
        """Whether plans append the tokens that grammars force."""
        self.hold_until_s = 0.0
        """Until when the next plan waits for a look ahead at forced tokens; 0: it does not."""
        self._queue: Queue = WaitingQueue()  # of the last plan

    def _begin_counts(self) -> None:
        self.leaving = False
        """The runner has announced that it leaves; it gets no further plan."""
        self.prefill_tokens = 0
        self.dropped_rows = 0
        self._first_number = 0

    def _divide(self) -> None:
        """Makes what chooses rows and makes room for them."""
        table, pool, plans, preempt = self.table, self.pool, self.plans, self.departures.preempt
        self.swapping = None
        if self.tiers is not None:
            self.swapping = Swapping(table, pool, self.prefix, self.tiers, self.step_times, preempt)
        self._displacing = Displacing(table, pool, plans, self.admission, self.ledger, preempt)
        self._rows = RunningRows(table, pool, plans, self.tiers, self.step_times, self._max_step_tokens, preempt)

    @property
    def preemptions(self) -> int:
        """Sequences preempted so far."""
        return self.departures.preemptions

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens served from the prefix cache."""
        return self.admission.cached_tokens

    @property
    def swaps(self) -> int:
        """Sequences whose KV went to the host pool when they were preempted."""
        return 0 if self.swapping is None else self.swapping.swaps

    @property
    def last_plan(self) -> int:
        """Number of the last plan; 0 before the first."""
        return self.plans.last_number

    def begin_after(self, number: int) -> None:
        """Sets the number of the session's last probe; all plans up to it are answered."""
        self.plans.last_number = self._first_number = number

    @property
    def answered(self) -> int:
        """Number of the last plan whose result was applied; no earlier plan is in flight."""
        return self.last_plan - len(self.in_flight)

    @property
    def probed(self) -> bool:
        """Whether the runner has computed a probe in this session."""
        return self._first_number > 0

    @property
    def has_finished(self) -> bool:
        """Whether the runner has answered a plan of this session, probes and plans without rows excluded."""
        return self.answered - self.moves.without_rows > self._first_number

    @property
    def is_copying(self) -> bool:
        """Whether copies to or from the host pool, or from other runners, need plans, even if no sequence runs or
        waits."""
        return self.moves.needed_plan > self.last_plan or (self.tiers is not None and self.tiers.busy)

    # ------------------------------------------------------------------ results

    def apply(self, number: int, result: plan_pb2.Result) -> AppliedResult | None:
        """Applies the result of the oldest plan in flight. Returns None for a duplicate. Raises BadResult.

        Sequences that ended are only reported; the caller makes them `leave`.
        """
        if number <= self.answered:
            return None
        if not self.in_flight or number != self.in_flight[0].number:
            expected = self.in_flight[0].number if self.in_flight else "none"
            raise BadResult(f"result of plan {number}, expected {expected}")
        flight = self.in_flight[0]
        if self.tiers is not None:
            self.tiers.apply(number, result, is_empty=not flight.flags, is_last=number == self.last_plan)
        if flight.drafts is None and not flight.forced:
            applied = apply_rows(self.table, flight, result, self._clock())
        else:
            applied = apply_runs(self.table, flight, result, self._clock())
            self.drafting.applied(applied)
        if not flight.flags:
            self.moves.without_rows += 1
            self.timing.occupied(flight, applied.now_s)
            self.in_flight.popleft()
            return applied
        if result.HasField("timings"):
            applied.runner_s = (result.timings.forward_ns + result.timings.sample_ns) * 1e-9
        self.note_time(applied)
        early_s = result.timings.early_ns * 1e-9 if result.timings.HasField("early_ns") else None
        self.timing.learn(flight, applied.step_s, early_s)
        self.in_flight.popleft()
        self.dropped_rows += applied.dropped_rows
        self.prefix.confirm(flight, self.table)
        return applied

    def note_time(self, applied: AppliedResult) -> None:
        """Sets the runner time that the step took, and the runner's idle time before it, in seconds."""
        flight = applied.flight
        applied.step_s, applied.idle_s = self.timing.occupied(flight, applied.now_s)
        self.step_times.note(
            flight.starts,
            flight.counts,
            flight.num_decode,
            applied.step_s,
            applied.runner_s,
            applied.idle_s > 0,
            applied.drafted,
        )

    @property
    def due_at(self) -> float:
        """When to make the next plan (see `PlanTiming.due_at`)."""
        return self.timing.due_at(full=not self.table.free)

    # ------------------------------------------------------------------ leaving

    def settle(self, slot: int) -> None:
        """Appends the tokens that are so far only in the slot's columns to the log of the slot's sequence."""
        self.table.settle(slot)

    def forget_lowest_rank(self) -> None:
        """Discards the cached lowest rank, because a running sequence's rank has changed."""
        self.table.lowest = None

    def leave(self, sequence: Sequence, reason: str, *, failed: bool = False) -> None:
        """Removes the sequence from its slot (see `Departures.leave`)."""
        self.departures.leave(sequence, reason, failed=failed)

    def let_go(self, key: bytes) -> None:
        """Releases the blocks that a move holds under `key`."""
        self.moves.let_go(key, self.last_plan)

    def drop_slot(self, slot: int, blocks: list[int]) -> None:
        """Drops a slot that the runner still occupies from before a restart, and releases its blocks."""
        self.pool.release(blocks)
        self.plans.release_slot(slot)

    # ------------------------------------------------------------------ planning

    def plan(self, queue: Queue, policy: PolicyGuard) -> PlannedStep | None:
        """Plans and commits the next step. Returns None if no sequence can advance, and no copy needs a plan."""
        tiers = self.tiers
        if tiers is None or not tiers.is_open:
            return self._next_step(queue, policy) or self._needed()
        tiers.loads.sweep()
        swapped = self.swapping is not None and self.swapping.swap_out(queue, policy)
        step = self._next_step(queue, policy, swapped)
        if step is not None:
            tiers.offloads.demote(self.table.num_running)
        elif tiers.wants_plan or (tiers.is_copying and not self.in_flight):
            step = self.plans.without_rows()
        else:
            step = self._needed()
        if step is not None:
            tiers.start(step.number, step.plan)
        return step

    def _needed(self) -> PlannedStep | None:
        """Returns a plan without rows if one is needed for its releases."""
        return self.plans.without_rows() if self.moves.needed_plan > self.last_plan else None

    def _next_step(self, queue: Queue, policy: PolicyGuard, swapped: bool = False) -> PlannedStep | None:
        """Plans and commits the next step with rows; None if no sequence can advance.

        `swapped`: a sequence has just been swapped out, so that none is admitted.
        """
        waiting = bool(queue)
        self._queue = queue
        may_displace = waiting and policy.displaces and self._displacing.is_news(queue, policy)
        drafts = self.table.drafts and self.drafting.wants(self.last_plan, policy)
        if not may_displace and not drafts and not self.moves.arrivals and not (waiting and self.table.free):
            step = self.plans.follow()
            if step is not None:
                self.timing.planned(step.flight)
                return step
        if not self.table.num_running and not waiting and not self.moves.arrivals:
            return None
        if self.table.num_constrained and not (waiting and self.table.free) and better_together(self.table):
            return None
        displaced = may_displace and self._displacing.displace(queue, policy)
        draft, preempted = self._rows.decoding(queue, policy, forces=self.forces)
        prompts = self._rows.prompts(draft)
        if self.moves.arrivals:
            admit_arrivals(self.moves.arrivals, self.admission, draft, self.table, self._max_step_tokens)
        may_admit = not (preempted or displaced or swapped) and bool(queue)
        may_admit = may_admit and len(self.table.free) > len(self.moves.arrivals)
        if may_admit or prompts:
            budget = self._budget(draft, prompts, queue, policy)
            rest = StepBudget.of(budget, draft.num_positions, self._max_step_tokens)
            self._rows.add_prompts(draft, prompts, queue, budget, rest, self.admission if may_admit else None)
            if may_admit:
                self.admission.admit_waiting(draft, queue, policy, budget, rest)
        if not draft.num_rows:
            return None
        if self.table.drafts and not (prompts or draft.slots or draft.joined):
            self._add_drafts(draft, queue, policy)
        self.prefill_tokens += draft.prompt_positions
        step = self.plans.commit(draft)
        self.timing.planned(step.flight)
        if self.table.num_constrained:
            mark_awaiting(self.table, step.flight, step.plan)
        return step

    def _add_drafts(self, draft: PlanDraft, queue: Queue, policy: PolicyGuard) -> None:
        """Lets rows of a step without prompts draft, if the policy wants to."""
        decode, target_s = draft.decode, self.ledger.itl_target_s
        lengths = self.drafting.lengths(decode, self.last_plan, lambda: self.load(queue, decode), policy, target_s)
        if lengths is not None:
            waits = bool(queue) or self.ledger.waiting_tokens > 0
            positions = self.hello.max_sampled or self._max_step_tokens
            draft.drafts = lengths_within(self.plans, draft, lengths, positions, may_grow=not waits)

    def _budget(self, draft: PlanDraft, prompts: list[int], queue: Queue, policy: PolicyGuard) -> Budget:
        if policy.budgets:
            return policy.budget(self.load(queue, draft.decode, prompts[0] if prompts else None))
        return policy.rest_of_step(len(draft.decode), self._max_step_tokens)

    def load(self, queue: Queue, decode: npt.NDArray[np.int64], prompt: int | None = None) -> Load:
        """Returns the load for the policy, for a step that decodes the slots `decode`. `prompt`: slot of the first
        prompt under way."""
        load = load_view(self.hello, self.table, self.pool, queue, decode, self.ledger, self.step_times, prompt)
        return self.drafting.described(load, self.last_plan) if self.table.drafts else load

    def _retention_load(self) -> Load:
        """Returns the load by which prefixes are valued."""
        return self.load(self._queue, (self.table.lag == _ONE).nonzero()[0])


def _view_of(sequence: Sequence) -> RequestView:
    return request_view(sequence.request)
