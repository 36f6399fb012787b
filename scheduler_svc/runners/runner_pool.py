"""The runners of one engine, each with its scheduler: which may join, and which get the next plan.

Each turn of the engine visits only runners that can take a plan, after a result or when a sequence waits for them. So
its cost does not grow with the number of runners.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from roster_common.link_protocol import PROTOCOL_VERSION
from roster_protos import plan_pb2
from scheduler_svc.kv.block_pool import most_tokens
from scheduler_svc.kv.naming_secret import NamingSecret
from scheduler_svc.link.likeness import Likeness
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.plan.plan_timing import TimingRule
from scheduler_svc.policy import PolicyGuard
from scheduler_svc.runners.flushes import Flushes
from scheduler_svc.runners.rank_groups import RankGroups
from scheduler_svc.scheduler.prefix_cache import SharingRules
from scheduler_svc.scheduler.retention import HintLimits
from scheduler_svc.scheduler.scheduler import Scheduler
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from scheduler_svc.tiers.tiers import Tiers

NEARLY = 0.9
"""Fraction of the largest runner's capacity from which another runner counts as nearly as large; used for requests
without max_tokens."""


MOST_DRAFTS = 254
"""Largest number of drafts of a row: a plan states it in a byte, and a result has one token more."""


class RunnerPool:
    """Live sessions and their schedulers.

    The model is the first runner's for the life of the service, with the longest context of any runner so far, also
    of one that only a former scheduler served.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        clock: Callable[[], float],
        ledger: Ledger,
        retention: PolicyGuard | None = None,
    ) -> None:
        """`retention`: the policy that decides what prefix caches keep; None: the least recently used blocks go."""
        self.schedulers: dict[int, Scheduler] = {}
        self._tiers: dict[int, Tiers] = {}  # of the runners that have a host pool
        self._open: dict[int, Scheduler] = {}  # runners that may have room for a plan and work for it
        self._max_tokens = self._usual_tokens = 0
        self._expected: dict[int, int] = {}  # maximum number of tokens of a sequence on each runner on probation
        self.timing_rule = timing_rule(settings)
        self._held: list[tuple[float, int]] = []  # heap of times at which plans are due, with the runner's session
        self._due_at: dict[int, float] = {}  # of runners whose plan is held back; other entries of the heap are stale
        self.model: plan_pb2.Model | None = None
        self.likeness = Likeness()
        self.secret = NamingSecret()
        """With which the KV blocks of all runners are named."""
        self.flushes = Flushes()
        self.groups = RankGroups()
        self._settings = settings
        self._clock = clock
        self._ledger = ledger
        self._retention = retention
        target_ms = settings.itl_target_ms
        ledger.itl_target_s = None if target_ms is None else target_ms / 1000

    @property
    def max_tokens(self) -> int:
        """Maximum length, in tokens (prompt and output), of a sequence on any runner (see `Scheduler.most_tokens`).

        Runners on probation count, because they may serve again. While no runner serves, the last value counts too,
        because its runner is expected back.
        """
        return self._max_tokens

    @property
    def usual_tokens(self) -> int:
        """Maximum length, in tokens, that all serving runners nearly as large as the largest one can hold.

        A request without max_tokens gets this limit. Two runners of one kind differ by a few blocks, and the maximum
        over all runners would bind the request to the one that has more.
        """
        return self._usual_tokens

    def unfit(self, hello: plan_pb2.Hello) -> str:
        """Returns why a runner can't serve here, as a sentence; "" if it can."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"it uses protocol {hello.protocol_version}, not {PROTOCOL_VERSION}: upgrade the older of the two"
        if not hello.num_slots or not hello.num_blocks or not hello.block_size:
            return "it offers no slots or no KV blocks: give it more memory or a smaller model"
        if hello.max_step_tokens < hello.num_slots:
            return f"max_step_tokens ({hello.max_step_tokens}) must be at least its slots ({hello.num_slots})"
        if hello.cache_groups > 1:
            return f"its model needs {hello.cache_groups} block tables a sequence, this scheduler has one: upgrade it"
        if hello.max_drafts > MOST_DRAFTS:
            return f"it drafts up to {hello.max_drafts} tokens a row, more than {MOST_DRAFTS}: lower its max_drafts"
        other = next(iter(self.schedulers.values()), None)
        return self.likeness.unlike(hello, None if other is None else other.hello.block_size)

    def add(self, session: int, hello: plan_pb2.Hello) -> Scheduler:
        """Adds a runner that fits; returns its scheduler, which has no sequences."""
        self._note_context(hello)
        self.likeness.learn(hello)
        rules = SharingRules(self._settings.prefix_sharing, self._settings.isolate_tenants)
        scheduler = Scheduler(
            hello,
            sharing=rules,
            clock=self._clock,
            ledger=self._ledger,
            rule=self.timing_rule,
            forces=self._settings.forced_tokens,
            secret=self.secret,
            retention=self._retention,
            hints=HintLimits(self._settings.hint_longest_s, self._settings.hint_share),
        )
        self._expected.pop(session, None)
        self.schedulers[session] = self._open[session] = scheduler
        if scheduler.tiers is not None:
            self._tiers[session] = scheduler.tiers
        scheduler.step_times.on_fit = self._choose_slowest
        self._note_sizes()
        return scheduler

    def _note_context(self, hello: plan_pb2.Hello) -> None:
        """Raises the model's context length to the runner's; runners' models differ in nothing else."""
        longest = max(hello.model.context_length, hello.longest_context)
        if self.model is None:
            self.model = plan_pb2.Model.FromString(hello.model.SerializeToString())
        self.model.context_length = max(self.model.context_length, longest)

    def expect(self, session: int, hello: plan_pb2.Hello) -> None:
        """Notes the size of a runner that fits and is on probation, until `add` or `remove`."""
        self._expected[session] = most_tokens(hello)
        self._note_sizes()

    def expects(self, num_tokens: int) -> bool:
        """Returns whether a runner on probation can hold a sequence of `num_tokens`."""
        return any(size >= num_tokens for size in self._expected.values())

    def remove(self, session: int) -> Scheduler | None:
        """Removes the session; returns its scheduler, or None if it was not in the pool."""
        self._expected.pop(session, None)
        self._open.pop(session, None)
        self._due_at.pop(session, None)
        self._tiers.pop(session, None)
        scheduler = self.schedulers.pop(session, None)
        self._note_sizes()
        return scheduler

    def _note_sizes(self) -> None:
        self._ledger.runners = len(self.schedulers)
        self._choose_slowest()
        sizes = [s.most_tokens for s in self.schedulers.values()]
        if sizes:
            self._usual_tokens = min(size for size in sizes if size >= NEARLY * max(sizes))
        self._max_tokens = max(*(sizes or [self._max_tokens]), *self._expected.values(), 0)

    def _choose_slowest(self) -> None:
        """Chooses the runner whose times policies read where they ask for no particular one's."""
        times = (scheduler.step_times for scheduler in self.schedulers.values())
        self._ledger.step_times = max(times, key=lambda each: each.fitted_row_s, default=None)

    def progress(self, now_s: float) -> bool:
        """Returns whether any runner is not stalled: its oldest plan in flight, if any, is at most `stall_s` old.

        Runners on probation are not in the pool.
        """
        stall_s = self._settings.stall_s
        return any(not s.in_flight or now_s - s.in_flight[0].sent_at <= stall_s for s in self.schedulers.values())

    def ready(self) -> list[tuple[int, Scheduler]]:
        """Returns the runners that can take another plan now, if there is work for it."""
        self._take_due()
        return [(session, scheduler) for session, scheduler in list(self._open.items()) if self._is_open(session)]

    def takes_plan(self, session: int) -> bool:
        """Returns whether the runner can take another plan now."""
        return session in self._open and self._is_open(session)

    def rest(self, session: int) -> None:
        """Leaves a runner without work out of `ready` until it is woken."""
        self._open.pop(session, None)

    def wake(self, session: int) -> None:
        """Lets `ready` include a runner again: a result of it was applied, or a sequence waits for it."""
        if session in self.schedulers:
            self._open[session] = self.schedulers[session]
            self._due_at.pop(session, None)

    def prefetch(self) -> None:
        """Lets runners load what conversations will need soon."""
        self._ledger.prefetch_at = math.inf
        for session, scheduler in self.schedulers.items():
            if scheduler.retention.prefetch():
                self.wake(session)

    @property
    def computes(self) -> bool:
        """Whether any runner has a plan in flight."""
        return any(scheduler.in_flight for scheduler in self.schedulers.values())

    @property
    def next_result_at(self) -> float:
        """Predicted time of the next result; infinity if none is predicted."""
        return min((scheduler.timing.next_result_at for scheduler in self.schedulers.values()), default=math.inf)

    @property
    def next_due_at(self) -> float:
        """Time at which the next held-back plan is due; infinity if none is held back."""
        held = self._held
        while held and self._due_at.get(held[0][1]) != held[0][0]:
            heapq.heappop(held)
        return held[0][0] if held else math.inf

    @property
    def next_deadline_at(self) -> float:
        """Time at which the next load from a host pool is late; infinity if none is in flight."""
        if not self._tiers:
            return math.inf
        return min(tiers.loads.deadline_at for tiers in self._tiers.values())

    def expire_loads(self) -> None:
        """Ends the waits for loads from host pools that are late."""
        for session, tiers in self._tiers.items():
            if tiers.loads.expire():
                self.wake(session)

    def _take_due(self) -> None:
        """Opens the runners whose held-back plan is due."""
        now_s = self._clock() if self._held else 0.0
        while self.next_due_at <= now_s:
            _, session = heapq.heappop(self._held)
            del self._due_at[session]
            self._open[session] = self.schedulers[session]

    def _is_open(self, session: int) -> bool:
        """Returns whether a runner of `_open` can take a plan now. Otherwise takes it out until that changes.

        A plan may be better made later, so that it includes the requests that arrive until then.
        """
        scheduler = self.schedulers[session]
        if len(scheduler.in_flight) < scheduler.depth and (scheduler.moves.moving_out or not scheduler.leaving):
            due_at, now_s = scheduler.due_at if self.timing_rule.holds else 0.0, self._clock()
            if max(due_at, scheduler.hold_until_s) <= now_s:
                return True
            if due_at <= now_s:
                due_at = scheduler.hold_until_s
            elif due_at < math.inf:
                scheduler.timing.hold()
            if due_at < math.inf:
                self._due_at[session] = due_at
                heapq.heappush(self._held, (due_at, session))
        del self._open[session]
        return False


def timing_rule(settings: SchedulerSettings) -> TimingRule:
    """Returns how plans are timed: as given, otherwise as the profile says."""
    profile, depth, lead_ms = settings.tuned, settings.depth, settings.plan_lead_ms
    if lead_ms is not None:
        return TimingRule(depth or 2, depth or 2, lead_ms / 1000)
    return TimingRule(depth or profile.most_depth, depth or 2, None, profile.late_share)
