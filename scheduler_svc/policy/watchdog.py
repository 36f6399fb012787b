"""Interrupts a policy that takes too long, and never anything but the policy.

A thread looks at the call under way every quarter of the timeout; it sleeps while there are no calls. What is too old
gets `PolicyInterrupted` raised into it (`PyThreadState_SetAsyncExc`: works in whatever thread the engine runs, at the
next bytecode; a call that hangs in C is reported at once and interrupted when it returns to Python).

The interrupt is set under a lock, only while a call is open; a call is closed under the same lock, and what was set but
has not struck is then withdrawn. So it strikes between the opening and the end of the closing, and all of that is
inside one `try`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

PAUSE_S = 1.0
"""If the thread did not look for so long, and the process used no processor, it was stopped: nothing is slow."""

log = structlog.get_logger()


class PolicyInterrupted(BaseException):
    """Raised into a policy's call. Not an Exception, so that `except Exception` in the policy lets it pass."""


class PolicyTooSlow(RuntimeError):
    """The call was interrupted."""


def _raise_in(thread: int, exception: ctypes.py_object[type[BaseException]] | None) -> None:
    """Sets the exception that the thread raises at its next bytecode; None withdraws it."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


class Watchdog:
    """Runs calls with a timeout. One thread calls at a time."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.overruns = 0
        """Calls that took longer, whether they could be interrupted or not."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._asleep = False
        self._calls = 0
        self._caller = 0
        self._function = ""
        self._since_at: float | None = None  # when the open call began
        self._struck_at: float | None = None  # when it was last interrupted

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of the function (`name` in the log). Raises what it raises, or PolicyTooSlow if interrupted."""
        try:
            try:
                self._open(name)
                return function(*arguments)
            finally:
                self._close_call()
        except PolicyInterrupted:
            self._close_call()  # it may have struck before the first closing was through; a second one changes nothing
            raise PolicyTooSlow(f"took longer than {self.timeout_s * 1000:g} ms") from None

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _open(self, name: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="policy-watchdog", daemon=True)
            self._thread.start()
        self._caller = threading.get_ident()
        self._function = name
        self._calls += 1
        self._since_at = time.monotonic()
        if self._asleep:
            self._wake.set()

    def _close_call(self) -> None:
        with self._lock:
            self._since_at = None
            struck_at, self._struck_at = self._struck_at, None
        if struck_at is not None:
            _raise_in(self._caller, None)

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        seen = 0
        while not self._closed.is_set():
            if seen == self._calls and self._since_at is None:
                self._sleep(seen)
            seen = self._calls
            overrun_s = self._strike(time.monotonic())
            if overrun_s:
                log.warning("the policy takes too long", function=self._function, seconds=round(overrun_s, 3))
            looked_at, used_s = time.monotonic(), time.process_time()
            self._closed.wait(self.timeout_s / 4)
            gap_s = time.monotonic() - looked_at - self.timeout_s / 4
            if gap_s > PAUSE_S and time.process_time() - used_s < gap_s / 2:
                self._forgive(time.monotonic())

    def _forgive(self, now_s: float) -> None:
        """The open call begins anew."""
        with self._lock:
            if self._since_at is not None:
                self._since_at = now_s

    def _sleep(self, seen: int) -> None:
        """Until the next call; one that begins meanwhile sees `_asleep` or is seen here."""
        self._asleep = True
        if seen == self._calls:
            self._wake.wait()
        self._asleep = False
        self._wake.clear()

    def _strike(self, now_s: float) -> float:
        """Interrupts the open call if it is too old, again after each timeout. Returns its age when it is struck."""
        with self._lock:
            since_at, struck_at = self._since_at, self._struck_at
            if since_at is None or now_s - (struck_at or since_at) < self.timeout_s:
                return 0.0
            self._struck_at = now_s
            self.overruns += struck_at is None
            _raise_in(self._caller, ctypes.py_object(PolicyInterrupted))
            return now_s - since_at
