"""A service's command in this process: for what it says when it can't start, without the second that a process takes.

That the command as a process says and does the same is shown by one case in each file that uses this.
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
    """How a command ended."""

    returncode: int
    stderr: str


def run_scheduler(*flags: str) -> Ended:
    """`roster-scheduler` with these flags, which it must refuse: it would serve until a signal comes."""

    def main() -> None:
        worker = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # waits for its stdin, as one that was just started
        sys.exit(service.run(worker))

    return _ended(main, flags)


def run_runner(*flags: str) -> Ended:
    """`roster-runner` with these flags, which it must refuse."""
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
