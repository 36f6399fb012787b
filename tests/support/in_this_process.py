"""Runs a service's command in this process, to test its startup errors without the second that a process takes.

Each file that uses this has one case that runs the command as a process and expects the same output.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

from runner_svc import main as runner_main
from scheduler_svc.operation import service


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit status and stderr of a command."""

    returncode: int
    stderr: str


def run_scheduler(*flags: str) -> Ended:
    """Runs `roster-scheduler` with these flags, which it must refuse: otherwise it would serve until a signal."""

    def main() -> None:
        worker = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # waits for its stdin, as a newly started worker does
        sys.exit(service.run(worker))

    return _ended(main, flags)


def run_runner(*flags: str) -> Ended:
    """Runs `roster-runner` with these flags, which it must refuse."""
    return _ended(runner_main.main, flags)


def _ended(main: Callable[[], None], flags: tuple[str, ...]) -> Ended:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    interval_s = sys.getswitchinterval()
    stderr, status = io.StringIO(), 0
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROSTER_")}
    try:
        with (
            mock.patch.object(sys, "argv", ["roster", *flags]),
            mock.patch.dict(os.environ, environment, clear=True),
            contextlib.redirect_stderr(stderr),
        ):
            main()
    except SystemExit as end:
        assert isinstance(end.code, int), end
        status = end.code
    finally:
        sys.setswitchinterval(interval_s)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(status, stderr.getvalue())
