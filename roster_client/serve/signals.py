"""Signals that end a command in order: they cancel its task, so that its `finally` blocks stop what it started."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Within it, SIGINT, SIGTERM and SIGHUP cancel the current task, each time they come."""
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
