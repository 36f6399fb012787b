"""How a service imports its modules, and starts processes while it does."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager


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
