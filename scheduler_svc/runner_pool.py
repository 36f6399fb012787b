"""The runners behind one engine, each with its roster; which may join, and which get the next plan."""

from __future__ import annotations

from collections.abc import Callable

from protos import plan_pb2
from scheduler_svc.ledger import Ledger
from scheduler_svc.prefix_sharing import SharingRules
from scheduler_svc.runner_link import PROTOCOL_VERSION
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.settings import SchedulerSettings


class RunnerPool:
    """Live sessions and their schedulers. The model is that of the first runner, for as long as the service lives."""

    def __init__(self, settings: SchedulerSettings, clock: Callable[[], float], ledger: Ledger) -> None:
        self.schedulers: dict[int, Scheduler] = {}
        self.model: plan_pb2.Model | None = None
        self._settings = settings
        self._clock = clock
        self._ledger = ledger

    @property
    def max_tokens(self) -> int:
        """Most tokens (prompt and output) of one sequence that some runner can hold: the last one needs no KV."""
        return max((s.hello.num_blocks * s.hello.block_size + 1 for s in self.schedulers.values()), default=0)

    def unfit(self, hello: plan_pb2.Hello) -> str:
        """Why a runner can't serve here, as a sentence; "" if it can."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"it speaks protocol {hello.protocol_version}, not {PROTOCOL_VERSION}: upgrade the older of the two"
        if not hello.num_slots or not hello.num_blocks or not hello.block_size:
            return "it offers no slots or no KV blocks: give it more memory or a smaller model"
        if hello.max_step_tokens < hello.num_slots:
            return f"max_step_tokens ({hello.max_step_tokens}) must be at least its slots ({hello.num_slots})"
        if self.model is None:
            return ""
        ours, theirs = self.model, hello.model
        if (theirs.name, theirs.weights_version) != (ours.name, ours.weights_version):
            return (
                f"it serves {theirs.name!r} ({theirs.weights_version}), this service {ours.name!r} "
                f"({ours.weights_version}): start it with the same model, or restart the scheduler"
            )
        return ""

    def add(self, session: int, hello: plan_pb2.Hello) -> None:
        """A runner that fits has joined."""
        if self.model is None:
            self.model = hello.model
        rules = SharingRules(self._settings.prefix_sharing, self._settings.isolate_tenants)
        self.schedulers[session] = Scheduler(hello, sharing=rules, clock=self._clock, ledger=self._ledger)

    def remove(self, session: int) -> Scheduler | None:
        """Takes the session's roster out."""
        return self.schedulers.pop(session, None)

    def ready(self) -> list[tuple[int, Scheduler]]:
        """Runners that may get another plan, the least loaded first."""
        ready = [
            (session, scheduler)
            for session, scheduler in self.schedulers.items()
            if len(scheduler.in_flight) < min(self._settings.depth, scheduler.hello.max_depth or 1)
        ]
        if len(ready) > 1:
            ready.sort(key=lambda item: item[1].table.num_running / item[1].table.num_slots)
        return ready
