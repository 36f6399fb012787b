"""A rank's process as its launcher sees it: a new interpreter, or a fork of the warm process."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from runner_svc.launch.starting import BROKEN


class RankChild(Protocol):
    """A child of the launcher, which waits for its end."""

    @property
    def pid(self) -> int:
        """Process id; 0 until the process has said that it runs, as of the last `poll`."""

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `poll` has news."""

    def poll(self) -> int | None:
        """Returns the exit status (-N for signal N), or None while the process runs or is about to."""

    def terminate(self) -> None:
        """Sends SIGTERM to the process if it runs."""

    def kill(self) -> None:
        """Sends SIGKILL to the process if it runs."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the process has ended, at most for so long."""

    def close(self) -> None:
        """Frees the descriptor."""


class NewRank:
    """A rank that is a new interpreter."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], page: int) -> None:
        """`page`: descriptor of the group's memory, which the rank inherits."""
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(page,),
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
        self.pid = self._process.pid
        self._descriptor = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._descriptor

    def poll(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def close(self) -> None:
        os.close(self._descriptor)


class ForkedRank:
    """A rank that another process forks, and that becomes a child of this one before it says that it runs.

    If it is never forked, it has ended with status BROKEN. It waits for what it is to do.
    """

    def __init__(self, link: socket.socket) -> None:
        """`link`: receives the rank's process id, or the end of the file if no process is left that could send it."""
        self.pid = 0
        self._link = link
        self._descriptor = link.fileno()
        self._pidfd = -1
        self._status: int | None = None

    def assign(self, task: bytes) -> None:
        """Sends the process its task, once; it may not run yet."""
        with suppress(OSError):  # it has ended, which `poll` sees
            self._link.send(task)

    def fileno(self) -> int:
        return self._descriptor

    def poll(self) -> int | None:
        if not self.pid and self._status is None:
            self._meet(socket.MSG_DONTWAIT)
        if self.pid and self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def _meet(self, flags: int = 0) -> None:
        try:
            told = self._link.recv(32, flags)
        except BlockingIOError:
            return
        except OSError:
            told = b""
        if not told:
            self._status = BROKEN
            return
        self.pid = int(told)
        self._descriptor = self._pidfd = os.pidfd_open(self.pid)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.pid and self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float | None = None) -> None:
        """As of `RankChild`. A rank without a process id is waited for until it has one, or never will.

        Call it then when the process that forks it has ended.
        """
        if not self.pid and self._status is None:
            self._meet()
        if self.poll() is None:
            select.select([self._descriptor], [], [], timeout_s)
            self.poll()

    def close(self) -> None:
        self._link.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
