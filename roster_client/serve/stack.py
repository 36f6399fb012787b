"""Runs both services as child processes: starts them, waits until they serve, replaces the scheduler, stops them.

Used by `roster serve`, `roster demo` and the benchmarks.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from roster_client.client.async_client import RosterClient
from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import UnavailableError
from roster_client.serve.child_process import ChildProcess, OnLine
from roster_client.serve.free_ports import free_ports
from roster_common.setting_options import as_arguments
from roster_protos import inference_pb2 as pb

SCHEDULER = "scheduler"
RUNNER = "runner"
_MODULES = {SCHEDULER: "scheduler_svc.main", RUNNER: "runner_svc.main"}
_POLL_S = 0.2
_LOST_S = 1.0
"""Seconds that requests get if the runner has ended, without which none of them can finish."""
# Part of the runner's lines about a download, a conversion or the loading of weights.
_PROGRESS = "percent"
# On SIGTERM the scheduler waits for running requests up to its drain time; the runner ends at once.
_GRACE_S = {SCHEDULER: 40.0, RUNNER: 10.0}


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The services' addresses: gRPC and metrics as host:port, the link as a ZeroMQ endpoint."""

    listen: str = "127.0.0.1:50061"
    admin_listen: str = "127.0.0.1:50062"
    link: str = "tcp://127.0.0.1:50063"
    metrics_listen: str = "127.0.0.1:50064"

    @classmethod
    def from_settings(cls, **given: str | None) -> Self:
        """Returns the given addresses, and the others from the settings and defaults of `roster-scheduler`.

        Raises ValueError for settings that can't be used.
        """
        from scheduler_svc.settings.scheduler_settings import SchedulerSettings

        settings = SchedulerSettings.read(**{name: value for name, value in given.items() if value is not None})
        return cls(settings.listen, settings.admin_listen, settings.link, settings.metrics_listen)

    @classmethod
    def free(cls) -> Self:
        """Returns loopback addresses with free ports."""
        api, admin, link, metrics = (f"127.0.0.1:{port}" for port in free_ports(4))
        return cls(api, admin, f"tcp://{link}", metrics)


class ServiceDiedError(Exception):
    """A service exited unexpectedly."""

    def __init__(self, child: ChildProcess) -> None:
        code = child.returncode
        if code is not None and code < 0:  # its last line is no reason
            memory = ": it was killed, perhaps because memory was short" if -code == signal.SIGKILL else ""
            super().__init__(f"the {child.name} ended with signal {-code} ({signal.strsignal(-code)}){memory}")
        else:
            last = child.tail[-1] if child.tail else "it printed nothing"
            super().__init__(f"the {child.name} ended with exit status {code}: {last}")
        self.child = child

    @property
    def drained(self) -> bool:
        """Whether it is the scheduler, which ended as it does after `roster drain`."""
        return self.child.name == SCHEDULER and self.child.returncode == 0


class NotReadyError(Exception):
    """The services did not become ready in time."""


class Stack:
    """A scheduler and a runner; an `async with` stops both at its end in any case.

    Flags are settings by name (`{"policy": "static"}` becomes `--policy static`); settings not given come from the
    `ROSTER_*` environment and the services' defaults.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        scheduler: Mapping[str, object] | None = None,
        runner: Mapping[str, object] | None = None,
        on_line: OnLine = lambda name, line: None,
        credentials: Credentials = IN_THE_CLEAR,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: that of the services; None: this process's."""
        self.endpoints = endpoints
        self._environment = environment
        self._flags = {
            SCHEDULER: {
                "listen": endpoints.listen,
                "admin_listen": endpoints.admin_listen,
                "link": endpoints.link,
                "metrics_listen": endpoints.metrics_listen,
                **(scheduler or {}),
            },
            RUNNER: {"link": endpoints.link, **(runner or {})},
        }
        self._on_line = on_line
        self._credentials = credentials
        self._progress_at = time.monotonic()
        self._children: dict[str, ChildProcess] = {}
        self._grace_s = dict(_GRACE_S)

    async def start(self) -> None:
        """Starts both services; they connect in any order."""
        for name in (SCHEDULER, RUNNER):
            await self._start(name)

    async def start_beside(self, name: str, command: Sequence[str], grace_s: float) -> None:
        """Starts a further process, which ends with the services; SIGKILL follows SIGTERM after `grace_s` seconds."""
        self._grace_s[name] = grace_s
        self._children[name] = await ChildProcess.start(name, command, self._line, self._environment)

    async def swap_scheduler(self, **flags: object) -> None:
        """Stops the scheduler and starts another with these flags changed; the runner keeps its weights."""
        await self._stop(SCHEDULER)
        self._flags[SCHEDULER] |= flags
        await self._start(SCHEDULER)

    def pid(self, name: str) -> int:
        """Returns the process of a service that was started. Raises KeyError for another."""
        return self._children[name].pid

    async def wait_ready(self, timeout_s: float) -> pb.GetModelResponse:
        """Waits until requests are accepted and returns the model. Raises ServiceDiedError or NotReadyError.

        `timeout_s`: seconds since the runner last reported progress; a download may take longer than that.
        """
        self._progress_at = time.monotonic()
        async with RosterClient(self.endpoints.listen, credentials=self._credentials) as client:
            while time.monotonic() < self._progress_at + timeout_s:
                self.check_alive()
                try:
                    return await client.get_model(deadline_s=2)
                except UnavailableError:
                    await asyncio.sleep(_POLL_S)
        raise NotReadyError(f"the services did not become ready within {timeout_s:g} s")

    def _line(self, name: str, text: str) -> None:
        if name == RUNNER and _PROGRESS in text:
            self._progress_at = time.monotonic()
        self._on_line(name, text)

    async def wait_death(self) -> ServiceDiedError:
        """Waits until one of the services exits by itself."""
        tasks = {asyncio.create_task(child.wait()): child for child in self._children.values()}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return ServiceDiedError(tasks[done.pop()])
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Stops the scheduler, then the others, which the scheduler's streams may need to finish."""
        runner = self._children.get(RUNNER)
        lost = runner is not None and runner.returncode is not None
        try:
            await self._stop(SCHEDULER, _LOST_S if lost else None)
        finally:
            await asyncio.gather(*[self._stop(name) for name in list(self._children)])

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self, name: str) -> None:
        command = [sys.executable, "-m", _MODULES[name], *as_arguments(self._flags[name])]
        self._children[name] = await ChildProcess.start(name, command, self._line, self._environment)

    async def _stop(self, name: str, again_s: float | None = None) -> None:
        if child := self._children.pop(name, None):
            await child.stop(self._grace_s[name], again_s)

    def check_alive(self) -> None:
        """Raises ServiceDiedError if a process has ended."""
        for child in self._children.values():
            if child.returncode is not None:
                raise ServiceDiedError(child)
