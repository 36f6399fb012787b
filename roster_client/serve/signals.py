"""Handles signals by cancelling the command's task, so that its `finally` blocks stop the processes it started."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Makes each SIGINT, SIGTERM and SIGHUP cancel the current task within the context."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("cancelled_by_signals needs a running task")
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
