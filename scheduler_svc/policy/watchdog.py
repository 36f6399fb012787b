"""Interrupts a policy call that exceeds the timeout, and never any other code.

A thread checks the open call every quarter of the timeout, and sleeps while there are no calls. It interrupts a call
that exceeds the timeout by raising `PolicyInterrupted` in it. `PyThreadState_SetAsyncExc` does this in any thread, at
the next bytecode; a call that hangs in C is logged at once and interrupted when it returns to Python.

The interrupt is set under a lock, and only while a call is open. Closing the call takes the same lock and then
withdraws an interrupt that is set but not yet raised. The exception can therefore be raised only between the opening of
the call and the end of its closing, which lie inside one `try`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

PAUSE_S = 1.0
"""If the watchdog's thread ran this many seconds late and the process used no CPU meanwhile, the process was stopped
and the policy is not slow."""

log = structlog.get_logger()


class PolicyInterrupted(BaseException):
    """Raised in a policy's call. It is not an Exception, so that `except Exception` in the policy does not catch it."""


class PolicyTooSlow(RuntimeError):
    """The policy's call was interrupted."""


def _raise_in(thread: int, exception: ctypes.py_object[type[BaseException]] | None) -> None:
    """Sets the exception that the thread raises at its next bytecode; None withdraws it."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


class Watchdog:
    """Runs calls with a timeout. Only one thread may call at a time."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.overruns = 0
        """Calls that exceeded the timeout, whether or not they could be interrupted."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._asleep = False
        self._calls = 0
        self._caller = 0
        self._function = ""
        self._since_at: float | None = None  # start of the open call
        self._struck_at: float | None = None  # last interrupt of the open call

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function, which the log names `name`. Raises what it raises, or PolicyTooSlow if interrupted."""
        try:
            try:
                self._open(name)
                return function(*arguments)
            finally:
                self._close_call()
        except PolicyInterrupted:
            self._close_call()  # the interrupt may have cut the first closing short; closing twice is harmless
            raise PolicyTooSlow(f"took longer than {self.timeout_s * 1000:g} ms") from None

    def close(self) -> None:
        """Stops the thread."""
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
        """Restarts the timeout of the open call."""
        with self._lock:
            if self._since_at is not None:
                self._since_at = now_s

    def _sleep(self, seen: int) -> None:
        """Sleeps until the next call. A call that begins meanwhile either sees `_asleep` or is seen here."""
        self._asleep = True
        if seen == self._calls:
            self._wake.wait()
        self._asleep = False
        self._wake.clear()

    def _strike(self, now_s: float) -> float:
        """Interrupts the open call if it exceeds the timeout, and again after each further timeout.

        Returns the call's age in seconds if it was interrupted, otherwise 0.
        """
        with self._lock:
            since_at, struck_at = self._since_at, self._struck_at
            if since_at is None or now_s - (struck_at or since_at) < self.timeout_s:
                return 0.0
            self._struck_at = now_s
            self.overruns += struck_at is None
            _raise_in(self._caller, ctypes.py_object(PolicyInterrupted))
            return now_s - since_at
