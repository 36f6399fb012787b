"""Ctrl-C while a command still imports its modules: a status without a traceback.

Imports nothing that is not imported when an interpreter starts, so that hardly a moment is left.
"""

from __future__ import annotations

import _signal
import os

INTERRUPTED = 130


def end_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once, with status 130, until another handler takes over.

    Call it in the main thread before anything is imported that takes long. Child processes that wait for their stdin
    end with this process.
    """
    _signal.signal(_signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, as Python does by default."""
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)


def ignore_interrupts() -> None:
    """Makes Ctrl-C do nothing from here on: for a command that is done, whose status it would replace."""
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
