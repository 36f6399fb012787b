"""The warm process: it has imported what a rank imports, and forks ranks, which then start without an import.

The launcher forks it from itself, and so imports neither torch nor CuPy. The warm process has one thread and never
uses a GPU: each rank is the first to do so. It forks a rank by way of a process that ends at once. So the rank becomes
a child of the launcher, which takes in orphans: the launcher sees its exit status, and it lives on if the warm process
ends. That is started again then. One process is forked ahead, as a spare, and waits for a rank to be lost.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import NoReturn

import structlog

from runner_svc.arithmetic.instruction_set import pin
from runner_svc.group.member import Place, prepare_environment
from runner_svc.launch.fitness import unfit
from runner_svc.launch.rank_child import ForkedRank, RankChild
from runner_svc.launch.with_parent import end_with
from runner_svc.settings.runner_settings import RunnerSettings

_PR_SET_CHILD_SUBREAPER = 36
_UNFIT = 4
"""Exit status of a warm process of which no rank can be forked."""
_PACKET = 1 << 16
_AGAIN_S = 5.0
"""Least seconds between two starts of a warm process, or of a spare that has ended, for which no rank waits."""
_LOOK_S = 0.0002

_ALWAYS = ("torch", "runner_svc.group.forming", "runner_svc.startup.host_pool")
_OF_TEST_BACKENDS = (
    "runner_svc.backends.hash_backend",
    "runner_svc.backends.hash_drafter",
    "runner_svc.backends.hash_shares",
)
_OF_MODELS = ("runner_svc.startup.gpu_probe", "runner_svc.backends.torch_backend")
_OF_GPUS = ("cupy", "runner_svc.gpu.loading", "runner_svc.gpu.ranked.backend")

log = structlog.get_logger()

ServeRank = Callable[[RunnerSettings, Place], int]
"""Runs this process as a rank, until it ends; returns the exit status."""


def modules(settings: RunnerSettings, on_gpus: bool) -> tuple[str, ...]:
    """Returns what a rank imports that the launcher does not."""
    if settings.device in ("hash", "null"):
        return _ALWAYS + _OF_TEST_BACKENDS
    return _ALWAYS + _OF_MODELS + (_OF_GPUS if on_gpus else ())


class Warm:
    """The warm process as its launcher sees it."""

    def __init__(self, settings: RunnerSettings, serve: ServeRank, page: int, on_gpus: bool) -> None:
        """`page`: descriptor of the group's memory, which ranks inherit."""
        self._settings, self._serve, self._page = settings, serve, page
        self._modules = modules(settings, on_gpus)
        self._pid = 0
        self._descriptor = -1
        self._control: socket.socket | None = None
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

    def start(self) -> None:
        """Forks the process from this one, if it does not run."""
        if self._pid:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            try:
                _Forking(theirs, self._page, launcher, self._serve).run(self._settings, self._modules)
            except BaseException:
                log.exception("the warm process failed")
            finally:
                leave(1)
        theirs.close()
        self._control, self._descriptor = ours, os.pidfd_open(self._pid)
        self._started_at = time.monotonic()

    def fork(self, settings: RunnerSettings, place: Place, environment: Mapping[str, str]) -> ForkedRank:
        """Has a rank forked, or takes the spare. It gets these variables besides those of this process."""
        task: dict[str, object] = {
            "place": asdict(place),
            "environment": dict(environment),
            "runner_id": settings.runner_id,
            "threads": settings.threads,
        }
        rank, self._spare = self._spare, None
        if rank is None or rank.poll() is not None:
            rank = self._ask()
        rank.assign(json.dumps(task).encode())
        return rank

    def _ask(self) -> ForkedRank:
        """Has a process forked that waits for its task."""
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, suppress(OSError):  # it has just ended, which `ours` says too
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ForkedRank(ours)

    def keep_spare(self) -> None:
        """Has a process forked for the next rank that is lost, unless there is one."""
        if self._spare is None and time.monotonic() >= self._spare_at:
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
            self.is_unfit = os.waitstatus_to_exitcode(status) == _UNFIT
            if not self.is_unfit:
                log.warning("the warm process has ended, and starts again", pid=pid)
        if not self.is_unfit and time.monotonic() >= self._started_at + _AGAIN_S:
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
        self._pid, self._control, self._descriptor = 0, None, -1


class _Forking:
    """What the warm process does: it imports, then forks a rank for each request."""

    def __init__(self, control: socket.socket, page: int, launcher: int, serve: ServeRank) -> None:
        self._control, self._launcher, self._serve = control, launcher, serve
        end_with(launcher, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):  # it ends with the launcher
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        close_all_but({0, 1, 2, page, control.fileno()})

    def run(self, settings: RunnerSettings, names: tuple[str, ...]) -> NoReturn:
        """Serves until it is killed."""
        began_at = time.monotonic()
        prepare_environment()
        if settings.deterministic:
            pin()  # before torch is imported
        for name in names:
            with suppress(Exception):  # a rank will meet the same error, and explain it
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # collections of a rank neither scan nor copy what all ranks share
        if why := unfit():
            log.warning("ranks are started as new processes, as none can be forked", reason=why)
            leave(_UNFIT)
        log.debug("the warm process is ready", seconds=round(time.monotonic() - began_at, 3))
        while True:
            asked, links, _, _ = socket.recv_fds(self._control, 1, 1)
            if not asked:
                leave(0)
            with socket.socket(fileno=links[0]) as link:
                try:
                    self._fork(settings, link)
                except OSError as error:
                    log.warning("a rank can't be forked", reason=error.strerror)

    def _fork(self, settings: RunnerSettings, link: socket.socket) -> None:
        """Forks a process for a rank, which the launcher adopts. Raises OSError if that can't be done."""
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return
        try:
            between = os.getpid()
            if not os.fork():
                self._become_rank(settings, link, between)
        except BaseException:
            log.exception("a rank can't be forked")
        finally:
            os._exit(0)

    def _become_rank(self, settings: RunnerSettings, link: socket.socket, parent: int) -> None:
        """Waits for a task and serves as a rank; does not return."""
        status = 1
        try:
            while os.getppid() == parent:
                time.sleep(_LOOK_S)
            end_with(self._launcher, signal.SIGKILL)
            os.setsid()
            self._control.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            with link:
                link.send(str(os.getpid()).encode())
                told = link.recv(_PACKET)
            if told:
                task = json.loads(told)
                os.environ.update(task["environment"])
                own = settings.model_copy(update={name: task[name] for name in ("runner_id", "threads")})
                status = self._serve(own, Place(**task["place"]))
        except SystemExit:
            status = 0
        except BaseException:
            log.exception("a rank failed")
        finally:
            leave(status)


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


def close_all_but(kept: set[int]) -> None:
    """Closes this process's other descriptors."""
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in kept:
            with suppress(OSError):  # it was that of the listing
                os.close(number)


def leave(status: int) -> NoReturn:
    """Ends this process without what its parent would do at its end."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
