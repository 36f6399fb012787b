"""The warm process: it has imported what a rank imports, and forks ranks, which then start without an import.

The launcher forks it from itself, and so imports neither torch nor CuPy. The warm process has one thread and never
uses a GPU: each rank is the first to do so. It forks a rank by way of a process that ends at once. So the rank becomes
a child of the launcher, which takes in orphans: the launcher sees its exit status, and it lives on if the warm process
ends. That is started again then. One process is forked ahead, as a spare, and waits for a rank to be lost.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

import structlog

from runner_svc.group.member import Place
from runner_svc.launch.forking import READY, UNFIT, ServeRank, become_warm, modules, start_anew
from runner_svc.launch.rank_child import ForkedRank, RankChild
from runner_svc.launch.starting import UNUSABLE
from runner_svc.settings.runner_settings import RunnerSettings

_PR_SET_CHILD_SUBREAPER = 36
_AGAIN_S = 5.0
"""Least seconds between two starts of a warm process, or of a spare that has ended, for which no rank waits."""

log = structlog.get_logger()


class Warm:
    """The warm process as its launcher sees it."""

    def __init__(
        self, settings: RunnerSettings, serve: ServeRank, page: int, on_gpus: bool, command: Sequence[str]
    ) -> None:
        """`page`: descriptor of the group's memory, which ranks inherit. `command`: starts this program."""
        self._settings, self._serve, self._page, self._command = settings, serve, page, command
        self._modules = modules(settings, on_gpus)
        self._pid = 0
        self._descriptor = -1
        self._control: socket.socket | None = None
        self._is_ready = False
        self._started_at = 0.0
        self._spare: ForkedRank | None = None
        self._spare_at = 0.0  # when another may be forked
        self.is_unfit = False
        """Whether ranks can't be forked of such a process."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def filenos(self) -> list[int]:
        """Returns the descriptors that become readable when `look` has something to do."""
        spare = [self._spare.fileno()] if self._spare is not None else []
        return [self._descriptor, *spare] if self._pid else spare

    @property
    def spares(self) -> list[ForkedRank]:
        """The process that waits for a rank to be lost, if there is one."""
        return [self._spare] if self._spare is not None else []

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        return self._pid

    @property
    def is_ready(self) -> bool:
        """Whether the process has imported its libraries, and so forks at once."""
        if self._control is not None and not self._is_ready:
            with suppress(OSError):  # it has said nothing yet
                self._is_ready = self._control.recv(1, socket.MSG_DONTWAIT) == READY
        return self._is_ready

    def start(self) -> None:
        """Starts the process, if it does not run and can be: as a fork, or as a new program once this one has threads,
        whose locks may be held.
        """
        if self._pid or self.is_unfit:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        self._started_at = time.monotonic()
        try:
            if threading.active_count() > 1:
                self._pid = start_anew(self._command, theirs.fileno(), self._page, self._modules)
            else:
                self._pid = self._forked(theirs)
        except OSError as error:  # no memory, or too many processes: ranks live on, and it is tried again
            log.warning("the warm process can't be started", reason=error.strerror)
            ours.close()
            theirs.close()
            return
        theirs.close()
        self._control, self._descriptor = ours, os.pidfd_open(self._pid)

    def _forked(self, theirs: socket.socket) -> int:
        launcher = os.getpid()
        pid = os.fork()
        if not pid:
            become_warm(theirs, self._page, launcher, self._serve, self._settings, self._modules)
        return pid

    def fork(self, settings: RunnerSettings, place: Place, environment: Mapping[str, str]) -> ForkedRank:
        """Has a rank forked, or takes the spare. It gets these variables besides those of this process.

        Called after `start`.
        """
        task: dict[str, object] = {
            "place": asdict(place),
            "environment": dict(environment),
            "runner_id": settings.runner_id,
            "threads": settings.threads,
        }
        rank, self._spare = self._spare, None
        if rank is not None and rank.poll() is not None:
            rank.close()
            rank = None
        rank = rank or self._ask()
        rank.assign(json.dumps(task).encode())
        return rank

    def _ask(self) -> ForkedRank:
        """Has a process forked that waits for its task."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, suppress(OSError):  # it has just ended, which `ours` says too
            if self._control is not None:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ForkedRank(ours)

    def keep_spare(self) -> None:
        """Has a process forked for the next rank that is lost, unless there is one."""
        if self._spare is None and self._pid and time.monotonic() >= self._spare_at:
            self._spare = self._ask()

    def look(self) -> None:
        """Starts the process again if it has ended, and forgets a spare that has."""
        if self._spare is not None and self._spare.poll() is not None:
            self._spare.close()
            self._spare, self._spare_at = None, time.monotonic() + _AGAIN_S
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if not pid:
                return
            self._forget()
            self.is_unfit = os.waitstatus_to_exitcode(status) in (UNFIT, UNUSABLE)  # new programs say what is unusable
            if not self.is_unfit:
                log.warning("the warm process has ended, and starts again", pid=pid)
        if time.monotonic() >= self._started_at + _AGAIN_S:
            self.start()

    def kill(self) -> None:
        """Ends the process, which `look` sees."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and the spare. The ranks that it has forked stay."""
        if self._pid:
            self.kill()
            os.waitpid(self._pid, 0)
            self._forget()
        if self._spare is not None:
            end(self._spare)
            self._spare = None

    def _forget(self) -> None:
        assert self._control is not None
        self._control.close()
        os.close(self._descriptor)
        self._pid, self._control, self._descriptor, self._is_ready = 0, None, -1, False


def end(child: RankChild) -> None:
    """Ends a rank's process, and waits for that; what would fork it must have ended."""
    child.wait(0.0)  # for its process id
    child.kill()
    child.wait()
    child.close()


def reap_orphans(known: set[int]) -> None:
    """Buries children of this process that have ended, but for those that others wait for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in known:
            return
        os.waitpid(ended.si_pid, 0)
