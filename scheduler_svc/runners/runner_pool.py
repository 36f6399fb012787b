"""The runners behind one engine, each with its roster; which may join, and which get the next plan.

A turn looks only at runners that can take a plan (after a result, that is), and at those without sequences only while
somebody waits: what it costs does not grow with the number of runners.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from roster_common.link_protocol import PROTOCOL_VERSION
from roster_protos import plan_pb2
from scheduler_svc.kv.block_pool import most_tokens
from scheduler_svc.link.likeness import Likeness
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.scheduler.prefix_cache import SharingRules
from scheduler_svc.scheduler.scheduler import Scheduler
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

NEARLY = 0.9
"""Part of what the largest runner holds from which on another counts as large, for requests that set no max_tokens."""


class RunnerPool:
    """Live sessions and their schedulers. The model is that of the first runner, for as long as the service lives, with
    the longest context that a runner had, also one that only a former scheduler met."""

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], float], ledger: Ledger) -> None:
        self.schedulers: dict[int, Scheduler] = {}
        self._open: dict[int, Scheduler] = {}  # may have room for a plan, and something to put into it
        self._max_tokens = self._usual_tokens = 0
        self._expected: dict[int, int] = {}  # what runners on probation hold
        lead_ms = settings.plan_lead_ms
        self._lead_s = None if lead_ms is None else lead_ms / 1000
        self.model: plan_pb2.Model | None = None
        self.likeness = Likeness()
        self._settings = settings
        self._clock = clock
        self._ledger = ledger

    @property
    def max_tokens(self) -> int:
        """Most tokens (prompt and output) of one sequence that some runner can hold (see `Scheduler.most_tokens`).

        Those on probation count, which may serve again. While no runner serves, what the last one could counts too: it
        is expected back.
        """
        return self._max_tokens

    @property
    def usual_tokens(self) -> int:
        """The same of all runners that serve and are nearly as large as the largest of those.

        A request that sets no max_tokens gets this: two runners of one kind differ by a few blocks, and it would be
        bound to the one that has more of them.
        """
        return self._usual_tokens

    def unfit(self, hello: plan_pb2.Hello) -> str:
        """Why a runner can't serve here, as a sentence; "" if it can."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"it speaks protocol {hello.protocol_version}, not {PROTOCOL_VERSION}: upgrade the older of the two"
        if not hello.num_slots or not hello.num_blocks or not hello.block_size:
            return "it offers no slots or no KV blocks: give it more memory or a smaller model"
        if hello.max_step_tokens < hello.num_slots:
            return f"max_step_tokens ({hello.max_step_tokens}) must be at least its slots ({hello.num_slots})"
        other = next(iter(self.schedulers.values()), None)
        return self.likeness.unlike(hello, None if other is None else other.hello.block_size)

    def add(self, session: int, hello: plan_pb2.Hello) -> Scheduler:
        """A runner that fits has joined; returns its roster, which is empty."""
        self._note_context(hello)
        self.likeness.learn(hello)
        rules = SharingRules(self._settings.prefix_sharing, self._settings.isolate_tenants)
        depth = self._settings.depth
        scheduler = Scheduler(hello, sharing=rules, clock=self._clock, ledger=self._ledger, depth=depth)
        self._expected.pop(session, None)
        self.schedulers[session] = self._open[session] = scheduler
        self._note_sizes()
        return scheduler

    def _note_context(self, hello: plan_pb2.Hello) -> None:
        """Models are the same but for their contexts; a runner takes what its own holds."""
        longest = max(hello.model.context_length, hello.longest_context)
        if self.model is None:
            self.model = plan_pb2.Model.FromString(hello.model.SerializeToString())
        self.model.context_length = max(self.model.context_length, longest)

    def expect(self, session: int, hello: plan_pb2.Hello) -> None:
        """A runner that fits is on probation: from now on until `add` or `remove`."""
        self._expected[session] = most_tokens(hello)
        self._note_sizes()

    def expects(self, num_tokens: int) -> bool:
        """Does a runner on probation hold so many tokens of one sequence?"""
        return any(size >= num_tokens for size in self._expected.values())

    def remove(self, session: int) -> Scheduler | None:
        """Takes the session's roster out, if it has one."""
        self._expected.pop(session, None)
        self._open.pop(session, None)
        scheduler = self.schedulers.pop(session, None)
        self._note_sizes()
        return scheduler

    def _note_sizes(self) -> None:
        sizes = [s.most_tokens for s in self.schedulers.values()]
        if sizes:
            self._usual_tokens = min(size for size in sizes if size >= NEARLY * max(sizes))
        self._max_tokens = max(*(sizes or [self._max_tokens]), *self._expected.values(), 0)

    def progress(self, now_s: float) -> bool:
        """Some runner is there that has not held a plan for longer than `stall_s`. Those on probation are not here."""
        stall_s = self._settings.stall_s
        return any(not s.in_flight or now_s - s.in_flight[0].sent_at <= stall_s for s in self.schedulers.values())

    def ready(self) -> list[tuple[int, Scheduler]]:
        """Runners that get another plan now, if there is something to put into it."""
        ready = []
        for session, scheduler in list(self._open.items()):
            if not self._has_room(scheduler):
                del self._open[session]
            elif not self._is_early(scheduler):
                ready.append((session, scheduler))
        return ready

    def takes_plan(self, scheduler: Scheduler) -> bool:
        """Whether the runner gets another plan now."""
        return self._has_room(scheduler) and not self._is_early(scheduler)

    def rest(self, session: int) -> None:
        """The runner has nothing to do: nobody looks at it until it is woken."""
        self._open.pop(session, None)

    def wake(self, session: int) -> None:
        """A result of this runner was applied, or somebody waits for it: it may take another plan."""
        if session in self.schedulers:
            self._open[session] = self.schedulers[session]

    @property
    def computes(self) -> bool:
        """Whether some runner has a plan."""
        return any(scheduler.in_flight for scheduler in self.schedulers.values())

    @property
    def next_due_at(self) -> float:
        """When the next plan is due that is held back; infinity where none is."""
        lead_s = self._lead_s
        if lead_s is None:
            return math.inf
        held = (s.due_at(lead_s) for s in self.schedulers.values() if self._has_room(s) and self._is_early(s))
        return min(held, default=math.inf)

    def _has_room(self, scheduler: Scheduler) -> bool:
        return len(scheduler.in_flight) < scheduler.depth and not scheduler.leaving

    def _is_early(self, scheduler: Scheduler) -> bool:
        """Whether a plan is better made later, when it can take in who comes until then."""
        return self._lead_s is not None and self._clock() < scheduler.due_at(self._lead_s)
