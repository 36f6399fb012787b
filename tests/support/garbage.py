"""Reference cycles, which only the garbage collector finds; its pauses stop every stream.

The count covers the whole process: use a process that does nothing else, with `in_own_process`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable


def circles_left_by(work: Callable[[], object]) -> int:
    """Returns the number of unreachable objects that the work left."""
    gc.collect()
    gc.disable()
    try:
        work()
        return gc.collect()
    finally:
        gc.enable()


def in_own_process(call: str, module: str) -> str:
    """Evaluates an expression over a module's names in a new process; returns its printed value."""
    command = [sys.executable, "-c", f"from {module} import *; print({call})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]
