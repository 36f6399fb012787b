"""Reference cycles, which only the garbage collector finds; its pauses stop every stream.

The count covers the whole process: use a process that does nothing else, with `in_own_process` or
`in_forked_process`.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.fork_server import Kind, start


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


def in_forked_process(call: str, module: str, kind: Kind) -> str:
    """Does the same in a process forked from one that has imported what a service does, and torch if of that kind."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        status = start("tests.support.garbage", [call, module], os.environ, log, kind=kind).wait(120)
        said = log.read_text("utf-8")
    assert status == 0, said
    return said.strip().splitlines()[-1]


if __name__ == "__main__":
    print(eval(sys.argv[1], vars(importlib.import_module(sys.argv[2]))))
