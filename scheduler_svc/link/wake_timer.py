"""A timer that ends a wait of ZeroMQ at a time of the monotonic clock, to microseconds.

ZeroMQ waits for whole milliseconds, which is as long as a short step. Linux's timerfd, which Python offers from 3.13
on, is called through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLOCK_MONOTONIC = 1
"""CLOCK_MONOTONIC of <time.h>, the clock of time.monotonic."""
_NONBLOCK = os.O_NONBLOCK
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_ABSOLUTE = 1
"""TFD_TIMER_ABSTIME of <sys/timerfd.h>."""


class _Times(ctypes.Structure):
    """The C library's `struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class WakeTimer:
    """A timer whose descriptor `fd` is readable from the set time on. Not thread-safe."""

    def __init__(self) -> None:
        """Raises OSError where there is no timerfd."""
        if not sys.platform.startswith("linux"):
            raise OSError("timerfd is a part of Linux")
        library = ctypes.CDLL(None, use_errno=True)
        self._set = library.timerfd_settime
        self.fd: int = library.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK | _CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "no timerfd")
        self._times = _Times(0, 0, 0, 0)
        self._address = ctypes.byref(self._times)

    def set(self, at_s: float) -> None:
        """Makes `fd` readable at this time of `time.monotonic`, at once if it has passed, and not before."""
        at_ns = max(1, int(at_s * 1e9))  # 0 would disarm it
        self._times.value_s, self._times.value_ns = divmod(at_ns, 1_000_000_000)
        self._set(self.fd, _ABSOLUTE, self._address, None)

    def disarm(self) -> None:
        """Makes `fd` unreadable."""
        self._times.value_s = self._times.value_ns = 0
        self._set(self.fd, 0, self._address, None)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)
