"""How the engine's thread waits between turns: it sleeps, to microseconds, and polls only near a predicted result.

A thread that sleeps wakes some 50 to 100 µs after its message, more where cores save power. Polling saves that, at the
price of a core. The engine therefore polls only around the time at which a result is predicted, only while few runners
compute, and only if cores are free: it counts them, and stops for a while when it is interrupted while polling.
"""

from __future__ import annotations

import math
import time

import zmq

from roster_common.usable_cores import usable_cores
from scheduler_svc.link.wake_timer import WakeTimer
from scheduler_svc.metrics.step_phases import StepPhases
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.settings.profiles import PollWindow
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

SPARE_CORES = 2
"""Cores left to other processes before the engine may poll, besides those of its own workers and runners."""
_MOST_RUNNERS = 8
"""Beyond this number of runners, a result is always near."""
_INTERRUPTED = 0.1
"""Share of the polling time for which the thread did not run, from which no core is free."""
_PAUSE_S = 1.0
"""Seconds without polling after that; doubled each time."""
_LONGEST_PAUSE_S = 64.0
"""Maximum of such a pause: about once a minute, polling is tried again."""


class FreeCore:
    """Whether a core is free for polling, as measured while polling."""

    def __init__(self) -> None:
        self._until_at = -math.inf
        self._pause_s = _PAUSE_S
        self._ran_s = self._polled_s = 0.0

    def now(self, now_s: float) -> bool:
        """Returns whether polling is worthwhile now."""
        return now_s >= self._until_at

    def polled(self, now_s: float, polled_s: float, ran_s: float) -> None:
        """Records `polled_s` of polling, during which the thread ran for `ran_s`."""
        self._polled_s += polled_s
        self._ran_s += ran_s
        if self._polled_s < 0.01:
            return
        if self._ran_s < (1 - _INTERRUPTED) * self._polled_s:
            self._until_at = now_s + self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        else:
            self._pause_s = max(_PAUSE_S, self._pause_s / 1.01)
        self._polled_s = self._ran_s = 0.0


class EngineWait:
    """Waits for input of the engine's sockets."""

    def __init__(self, settings: SchedulerSettings, pool: RunnerPool, phases: StepPhases) -> None:
        """`phases` counts the time spent polling."""
        self._phases = phases
        self._poller = zmq.Poller()
        self._pool = pool
        given_us = settings.busy_poll_us
        self._always_s = None if given_us is None else given_us / 1e6
        self._window = settings.tuned.poll if given_us is None else None
        self._spare_cores = usable_cores() - settings.front_workers - SPARE_CORES
        self._core = FreeCore()
        try:
            self._timer: WakeTimer | None = WakeTimer()
            self._poller.register(self._timer.fd, zmq.POLLIN)
        except (OSError, AttributeError):
            self._timer = None

    def watch(self, source: zmq.Socket[bytes] | int) -> None:
        """Adds a socket or descriptor whose input ends a wait."""
        self._poller.register(source, zmq.POLLIN)

    def until(self, until_at: float) -> None:
        """Waits for input, at most until that time of `time.monotonic`."""
        now_s = time.monotonic()
        if self._always_s:
            if self._pool.computes and self._poll(now_s, min(until_at, now_s + self._always_s)):
                return
        elif self._window is not None and self._wait_for_result(now_s, until_at, self._window):
            return
        self._sleep(until_at)

    def close(self) -> None:
        """Closes the timer."""
        if self._timer is not None:
            self._timer.close()

    def _wait_for_result(self, now_s: float, until_at: float, window: PollWindow) -> bool:
        """Waits while a result is predicted soon, and polls near its time. Returns whether there is input."""
        runners = len(self._pool.schedulers)
        if not runners or runners > min(self._spare_cores, _MOST_RUNNERS) or not self._core.now(now_s):
            return False
        result_at = self._pool.next_result_at
        if result_at == math.inf or now_s >= result_at + window.after_s:
            return False
        if now_s < result_at - window.before_s:
            if result_at - window.before_s >= until_at:
                return False
            if self._sleep(result_at - window.before_s):
                return True
            now_s = time.monotonic()
        return self._poll(now_s, min(until_at, result_at + window.after_s))

    def _poll(self, now_s: float, until_at: float) -> bool:
        """Polls until that time. Returns whether there is input."""
        begin_s, ran_s, poll = now_s, time.thread_time(), self._poller.poll
        found = False
        while now_s < until_at and not found:
            found = bool(poll(0))
            now_s = time.monotonic()
        if now_s > begin_s:
            self._phases.poll_s += now_s - begin_s
            self._core.polled(now_s, now_s - begin_s, time.thread_time() - ran_s)
        return found

    def _sleep(self, until_at: float) -> bool:
        """Sleeps until input or that time. Returns whether there is input."""
        wait_s = until_at - time.monotonic()
        timer = self._timer
        if timer is None or wait_s <= 0:
            return bool(self._poller.poll(max(0, math.ceil(wait_s * 1000))))
        timer.set(until_at)
        found = self._poller.poll()
        timer.disarm()
        return any(source != timer.fd for source, _ in found)
