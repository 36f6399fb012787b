"""Circles of objects, which only the garbage collector finds, whose pauses stop every stream.

It counts what the whole process left: ask in a process that does nothing else, by `in_own_process`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable


def circles_left_by(work: Callable[[], object]) -> int:
    """Unreachable objects after the work that were not there before."""
    gc.collect()
    gc.disable()
    try:
        work()
        return gc.collect()
    finally:
        gc.enable()


def in_own_process(call: str, module: str) -> str:
    """What `print` shows of an expression over a module's names, evaluated in a new process."""
    command = [sys.executable, "-c", f"from {module} import *; print({call})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]
