"""What the warm process does: it imports what a rank imports, and forks a process for each rank (see warm.py)."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import structlog

from runner_svc.arithmetic.instruction_set import pin
from runner_svc.group.member import Place, prepare_environment
from runner_svc.launch.fitness import unfit
from runner_svc.launch.with_parent import end_with
from runner_svc.settings.runner_settings import RunnerSettings

UNFIT = 4
"""Exit status of a warm process of which no rank can be forked."""
NEW = "ranks are started as new processes, as none can be forked"
READY = b"r"
"""What the warm process says once, when it forks whatever is asked for at once."""
PACKET_BYTES = 1 << 16
"""Most bytes of a rank's task."""
_VARIABLE = "_ROSTER_WARM"
"""Variable in which a launcher with threads passes a new program what it needs to be the warm process."""
_LOOK_S = 0.0002

# numpy.random draws the state of its global generator at import, which no code of a runner uses.
ALWAYS = ("torch", "numpy.random", "runner_svc.group.forming", "runner_svc.startup.host_pool")
OF_TEST_BACKENDS = (
    "runner_svc.backends.hash_backend",
    "runner_svc.backends.hash_drafter",
    "runner_svc.backends.hash_shares",
)
OF_MODELS = ("runner_svc.startup.gpu_probe", "runner_svc.backends.torch_backend")
_OF_GPUS = ("cupy", "runner_svc.gpu.loading", "runner_svc.gpu.ranked.backend")

log = structlog.get_logger()

ServeRank = Callable[[RunnerSettings, Place], int]
"""Runs this process as a rank, until it ends; returns the exit status."""


def modules(settings: RunnerSettings, on_gpus: bool) -> tuple[str, ...]:
    """Returns what a rank imports that the launcher does not."""
    if settings.device in ("hash", "null"):
        return ALWAYS + OF_TEST_BACKENDS
    return ALWAYS + OF_MODELS + (_OF_GPUS if on_gpus else ())


class Forking:
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

    def run(self, settings: RunnerSettings, names: Sequence[str]) -> NoReturn:
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
            log.warning(NEW, reason=why)
            leave(UNFIT)
        log.debug("the warm process is ready", seconds=round(time.monotonic() - began_at, 3))
        self._control.send(READY)
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
                told = link.recv(PACKET_BYTES)
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


def start_anew(command: Sequence[str], control: int, page: int, names: Sequence[str]) -> int:
    """Starts a warm process as a new program, as a process with threads can't fork it; returns its process id.

    `command`: starts this program with the same settings; it calls `fork_if_asked`. `control` and `page`: descriptors.
    Raises OSError.
    """
    task = {"control": control, "page": page, "launcher": os.getpid(), "modules": list(names)}
    environment = {**os.environ, _VARIABLE: json.dumps(task)}
    kept = [(os.POSIX_SPAWN_DUP2, number, number) for number in (control, page)]  # without the flag that closes them
    return os.posix_spawn(command[0], list(command), environment, file_actions=kept)


def fork_if_asked(settings: RunnerSettings, serve: ServeRank) -> None:
    """Serves as the warm process if `start_anew` has started this program, and does not return then."""
    told = os.environ.pop(_VARIABLE, None)
    if told is None:
        return
    task = json.loads(told)
    _end_threads()
    become_warm(socket.socket(fileno=task["control"]), task["page"], task["launcher"], serve, settings, task["modules"])


def _end_threads() -> None:
    """Ends the threads that OpenBLAS starts when numpy is imported, as any fork does; it starts them again at need."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def become_warm(
    control: socket.socket,
    page: int,
    launcher: int,
    serve: ServeRank,
    settings: RunnerSettings,
    names: Sequence[str],
) -> NoReturn:
    """Serves as the warm process until it is killed."""
    try:
        Forking(control, page, launcher, serve).run(settings, names)
    except BaseException:
        log.exception("the warm process failed")
    finally:
        leave(1)


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
