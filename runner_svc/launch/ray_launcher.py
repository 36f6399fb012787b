"""Runs groups of ranks on a cluster: places each on a node, starts lost ones again, and ends them all.

Each group is a `roster-runner` command of its own, whose launcher starts the ranks on its node. So a lost rank is
replaced there, and only a group whose command or node is gone is started again from here.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import structlog

from runner_svc.launch.starting import REJECTED, UNUSABLE, on_stop
from runner_svc.settings.runner_settings import RunnerSettings

PARENT_VARIABLE = "_ROSTER_END_WITH_PARENT"
"""Set for a command that is to end with the process that started it."""
_TICK_S = 0.5
_LONGEST_DELAY_S = 30.0
_SERVED_S = 60.0
_ROOM_S = 10.0

log = structlog.get_logger()


class CommandLost(Exception):
    """A command's node is gone, or its state unknown; the message says why."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one group needs of its node."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, settings: RunnerSettings) -> Resources:
        """Returns a GPU for each rank, or a CPU where the device is none."""
        on_cpu = settings.device in ("cpu", "hash", "null")
        size = settings.tensor_parallel
        return cls(size * (settings.threads or 1), 0) if on_cpu else cls(1, size)


class Cluster(Protocol):
    """What starts commands; `RayCluster` does."""

    def has_room(self, seconds: float) -> bool: ...
    def start(self, group: int, command: list[str]) -> Any: ...
    def status(self, command: Any) -> int | None: ...
    def stop(self, command: Any) -> None: ...
    def remove(self, command: Any) -> None: ...


@dataclass(slots=True)
class _Group:
    """One group's command and what is known of it."""

    arguments: list[str]
    command: Any = None
    start_at: float = 0.0
    started_at: float = 0.0
    failures: int = 0
    has_served: bool = False  # for a while, so that its settings can be used
    is_over: bool = False


class RayLauncher:
    """Supervises the groups. `run` needs the main thread."""

    def __init__(self, settings: RunnerSettings, cluster: Cluster, arguments: Sequence[str] | None = None) -> None:
        """`arguments`: of this command; default: this process's."""
        given = list(sys.argv[1:] if arguments is None else arguments)
        name = settings.runner_id or socket.gethostname()
        self._cluster = cluster
        self._each = Resources.of(settings)
        threads = self._each.cpus // settings.tensor_parallel if settings.device == "cpu" else 0
        self._groups = [_Group(_command(given, f"{name}-{number}", threads)) for number in range(settings.groups)]
        self._wake = threading.Event()
        self._stopping = False

    def run(self) -> int:
        """Serves until a signal, or until a group's settings or the scheduler end it; returns the exit status."""
        on_stop(self._stop)
        try:
            while not self._stopping and not self._cluster.has_room(_ROOM_S):
                log.warning(
                    "the cluster has no room for all groups yet: add nodes, lower groups, or set device to 'cpu'",
                    groups=len(self._groups),
                    cpus_each=self._each.cpus,
                    gpus_each=self._each.gpus,
                )
            while (status := self._turn()) is None:
                self._wake.wait(_TICK_S)
            return status
        finally:
            for group in self._groups:
                self._remove(group)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._wake.set()

    def _turn(self) -> int | None:
        """Starts what is due and looks at what runs; returns the exit status, if all end."""
        if self._wake.is_set():
            self._wake.clear()
            self._forward_stop()
        for number, group in enumerate(self._groups):
            if group.command is None:
                if self._stopping:
                    group.is_over = True
                elif time.monotonic() >= group.start_at:
                    group.command = self._cluster.start(number, group.arguments)
                    group.started_at = time.monotonic()
                    log.info("started a group", group=number)
            elif (status := self._look(number, group)) is not None:
                return status
        return 0 if all(group.is_over for group in self._groups) else None

    def _look(self, number: int, group: _Group) -> int | None:
        """Handles the end of a group's command; returns the exit status if all end with it."""
        try:
            status = self._cluster.status(group.command)
            if status is None:
                return None
            how = f"ended with status {status}"
        except CommandLost as error:
            status, how = -1, f"its node is lost: {error}"
        ran_s = time.monotonic() - group.started_at
        group.has_served |= ran_s >= _SERVED_S
        self._remove(group)
        if self._stopping:
            group.is_over = True
            return None
        if status in (UNUSABLE, REJECTED) and not group.has_served:
            log.error("a group can't serve: its output says why", group=number, status=status)
            return status
        group.failures = group.failures + 1 if ran_s < _LONGEST_DELAY_S else 1
        delay_s = min(_LONGEST_DELAY_S, 2.0 ** (group.failures - 1))
        group.start_at = time.monotonic() + delay_s
        log.warning("a group is lost, and starts again", group=number, how=how, delay_s=delay_s)
        return None

    def _forward_stop(self) -> None:
        """Has every group drain."""
        for group in self._groups:
            if group.command is not None:
                self._cluster.stop(group.command)

    def _remove(self, group: _Group) -> None:
        command, group.command = group.command, None
        if command is not None:
            self._cluster.remove(command)


def _command(arguments: list[str], name: str, threads: int) -> list[str]:
    """Returns a group's command line, whose ranks have `threads` each; 0: the group decides.

    The node's environment counts, but for this program's own variables.
    """
    own = [f"{variable}={value}" for variable, value in sorted(os.environ.items()) if variable.startswith("ROSTER_")]
    given = [*arguments, "--launcher", "local", "--groups", "1", "--runner-id", name]
    given += ["--threads", str(threads)] if threads else []
    return ["env", *own, f"{PARENT_VARIABLE}=1", "roster-runner", *given]
