"""The moments in which a command imports its modules: Ctrl-C gives a status without a traceback, and no collections."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


def end_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once, with status 130, until another handler takes over.

    Call it in the main thread before anything is imported that takes long. Child processes that wait for their stdin
    end with this process.
    """
    signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, as Python does by default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def without_collections() -> Iterator[None]:
    """Turns the garbage collector off: imports make many objects and hardly any garbage, so this saves a tenth."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Blocks SIGINT for processes started in this context, by this thread: they unblock it once they handle it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
