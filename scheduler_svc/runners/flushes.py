"""Which runners may still keep, in their host pools, copies that were flushed or forgotten.

A runner hears of it with a plan. One that had joined no session by then, or was lost before it answered that plan, says
in its next session that it has them: they are to be flushed then.
"""

from __future__ import annotations

from scheduler_svc.scheduler.scheduler import Scheduler


class Flushes:
    """Flushes of the engine, and which runners outside of the pool have heard of the last."""

    def __init__(self) -> None:
        self._any = False
        self._heard: set[str] = set()  # of the last flush
        self._unheard: set[str] = set()  # of what was purged, in their last session

    def flushed(self) -> None:
        """Notes that the runners of the pool are flushed now."""
        self._any = True
        self._heard.clear()

    def lost(self, scheduler: Scheduler) -> None:
        """Notes that a runner has left the pool."""
        runner, tiers = scheduler.hello.runner_id, scheduler.tiers
        if tiers is None or not tiers.is_open:
            return
        if tiers.host.purged or tiers.purged_in > scheduler.answered:
            self._unheard.add(runner)
        elif self._any:
            self._heard.add(runner)

    def must_flush(self, runner: str) -> bool:
        """Whether a runner that joins may have copies that were purged; asked once it has said what it keeps."""
        unheard = runner in self._unheard
        self._unheard.discard(runner)
        return unheard or (self._any and runner not in self._heard)
