"""Ends this process with the one that started it."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1


def end_with(parent: int | None, signal_number: int) -> None:
    """Has the system send this process `signal_number` when its parent ends, by whatever cause.

    Ends the process at once if that has happened already: its parent is not `parent`, or, without one, is init.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number)
    now = os.getppid()
    if now == 1 if parent is None else now != parent:
        os._exit(0)
