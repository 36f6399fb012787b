"""Waiting for a process that a test has started."""

from __future__ import annotations

import subprocess
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path

READY_S = 60.0


def wait_ready(process: subprocess.Popen[bytes], name: str, log: Path, answers: Callable[[], bool]) -> None:
    """Waits until `answers` returns True; it may raise urllib's errors.

    Raises AssertionError with the log's end if the process ends or is not ready within READY_S.
    """
    deadline = time.monotonic() + READY_S
    while True:
        assert process.poll() is None, f"{name} ended\n{log.read_text(errors='replace')[-4000:]}"
        assert time.monotonic() < deadline, f"{name} is not ready\n{log.read_text(errors='replace')[-4000:]}"
        try:
            if answers():
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        time.sleep(0.1)
