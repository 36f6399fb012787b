"""Words of shared memory on which processes sleep until another one changes them: Linux' futex.

`multiprocessing`'s semaphores wake one waiter at each call; here one call wakes all ranks.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1  # without the flag for words that only one process uses
_ALL = 2**31 - 1

_syscall = ctypes.CDLL(None, use_errno=True).syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_supported() -> bool:
    """Returns whether this system has futexes whose number is known here."""
    return os.uname().sysname == "Linux" and platform.machine() in _NUMBERS


class Word:
    """An unsigned 32-bit word in shared memory.

    If two processes bump it at the same moment, it may change only once, and one that is about to sleep may miss the
    second change. So sleepers of a word with several writers set a short limit.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        """`offset`: where the word begins in `memory`, in bytes; a multiple of 4."""
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._call = ctypes.c_long(_NUMBERS[platform.machine()])
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))

    @property
    def value(self) -> int:
        return self._word.value

    def bump(self) -> None:
        """Changes the word and wakes all that sleep on it."""
        self._word.value = (self._word.value + 1) & 0xFFFFFFFF
        _syscall(self._call, self._address, _WAKE, _ALL, None, None, 0)

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleeps until the word is bumped, at most for `seconds`; returns at once if it is no longer `seen`."""
        whole, rest = divmod(seconds, 1)
        limit = _Timespec(int(whole), int(rest * 1e9))
        failed = _syscall(self._call, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)
        if failed and (number := ctypes.get_errno()) not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, os.strerror(number))
