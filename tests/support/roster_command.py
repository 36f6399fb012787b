"""The `roster` command as a real process, for tests of signals and lifetimes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.support.process_state import command_line, running

SERVICES = ("scheduler_svc.main", "runner_svc.main")


class RosterCommand:
    """A running `roster`; its lines (stdout and stderr) are read as they arrive."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "roster_client.cli", *arguments],
            env=inherited | {"OMP_NUM_THREADS": "1", "COLUMNS": "160", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def wait_for(self, accept: Callable[[str], bool], timeout_s: float = 60) -> str:
        """Waits for a line that `accept` accepts and returns it."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        while time.monotonic() < deadline:
            while seen < len(self.lines):
                seen += 1
                if accept(self.lines[seen - 1]):
                    return self.lines[seen - 1]
            assert self.process.poll() is None or self._reader.is_alive(), self.output
            time.sleep(0.02)
        raise AssertionError(f"no such line within {timeout_s} s:\n{self.output}")

    def service(self, module: str) -> psutil.Process:
        """Returns the child that runs this module."""
        (child,) = [child for child in psutil.Process(self.process.pid).children() if module in command_line(child)]
        return child

    def descendants(self) -> list[psutil.Process]:
        """Returns all processes that it started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def exit_status(self, timeout_s: float = 60) -> int:
        """Waits for its end; returns the exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))


@contextmanager
def roster_command(*arguments: str, **environment: str) -> Iterator[RosterCommand]:
    """Runs the command; on exit, kills it and its descendants if it still runs."""
    command = RosterCommand(arguments, environment)
    left: list[psutil.Process] = []
    try:
        yield command
    finally:
        if command.process.poll() is None:
            left = [*command.descendants(), psutil.Process(command.process.pid)]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        command.process.wait(10)


def assert_gone(processes: list[psutil.Process], timeout_s: float = 10) -> None:
    """Checks that all these processes end within the timeout."""
    _, alive = psutil.wait_procs(processes, timeout_s)
    alive = running(alive)
    assert not alive, [command_line(process) for process in alive]
