"""Both services as real processes for end-to-end tests: free ports, a folder of their own, ended by pid.

    with RosterProcesses(tmp_path, runner={"device": "hash"}) as roster:
        client = SyncRosterClient(roster.address)

All methods are synchronous, and fast enough for fixtures of async tests, except `start`, which waits for readiness.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import DeadlineError, RequestCancelledError, UnavailableError
from roster_client.client.sync_client import SyncRosterClient
from roster_client.serve.stack import Endpoints
from roster_common.setting_options import as_arguments
from tests.support import fork_server
from tests.support.process_state import children_of, command_line, running
from tests.support.thoroughness import FULL

READY_S = 60.0
STOP_S = 20.0
MASK_PROCESS = "scheduler_svc.constrained.process.mask_process"
MODULES = {"scheduler": "scheduler_svc.main", "runner": "runner_svc.main"}


class RosterProcesses:
    """A scheduler and a runner with these settings, given by name; the environment's ROSTER_* variables are ignored."""

    def __init__(
        self,
        folder: Path,
        *,
        scheduler: Mapping[str, object] | None = None,
        runner: Mapping[str, object] | None = None,
        ready_s: float = READY_S,
        credentials: Credentials = IN_THE_CLEAR,
        runners: int = 1,
        fresh: bool = FULL,
    ) -> None:
        """With `runners` > 1 they are "runner", "runner-2", "runner-3", ...; the names are also their `runner_id`s.

        `fresh`: each process is a new interpreter (see fork_server).
        """
        endpoints = Endpoints.free()
        self.address = endpoints.listen
        self.admin_address = endpoints.admin_listen
        self.metrics_address = endpoints.metrics_listen
        self._settings = {
            "scheduler": {
                "listen": endpoints.listen,
                "admin_listen": endpoints.admin_listen,
                "link": endpoints.link,
                "metrics_listen": endpoints.metrics_listen,
                **(scheduler or {}),
            },
            "runner": {"link": endpoints.link, "runner_id": "runner", **(runner or {})},
        }
        for number in range(2, runners + 1):
            name = f"runner-{number}"
            self._settings[name] = {**self._settings["runner"], "runner_id": name}
        self._folder = folder
        self._ready_s = ready_s
        self._credentials = credentials
        self._fresh = fresh
        self._processes: dict[str, fork_server.ServiceProcess] = {}

    def setting(self, service: str, name: str) -> object:
        """Returns a setting with which a service is started. Raises KeyError if it was not given."""
        return self._settings[service][name]

    def start(self) -> None:
        """Starts both services and waits until they are ready. Raises AssertionError with their logs on failure."""
        for name in self._settings:
            self.start_one(name)
        self.wait_ready()

    def start_one(self, name: str) -> None:
        """Starts one service: "scheduler", "runner" or "runner-N"."""
        flags = as_arguments(self._settings[name])
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")}
        self._processes[name] = fork_server.start(
            MODULES[name.partition("-")[0]],
            flags,
            environment | {"OMP_NUM_THREADS": "1"},
            self._folder / f"{name}.log",
            fresh=self._fresh,
            kind=_kind(name, self._settings[name]),
        )

    def wait_ready(self) -> None:
        """Waits until GetModel answers."""
        deadline = time.monotonic() + self._ready_s
        with SyncRosterClient(self.address, credentials=self._credentials) as client:
            while True:
                dead = [name for name, process in self._processes.items() if process.poll() is not None]
                assert not dead, f"{dead} ended early\n{self.logs()}"
                assert time.monotonic() < deadline, f"not ready within {self._ready_s:g} s\n{self.logs()}"
                try:
                    client.get_model(deadline_s=2)
                    return
                except (DeadlineError, RequestCancelledError, UnavailableError):  # busy, ending, or not there yet
                    time.sleep(0.05)

    def await_workers(self, count: int) -> None:
        """Waits until `count` front workers know the model.

        One makes the service ready, but another may take a connection.
        """
        log = self._folder / "scheduler.log"
        deadline = time.monotonic() + self._ready_s
        while log.read_text(errors="replace").count("context_length=") < count:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def settings(self, name: str) -> dict[str, object]:
        """Returns the settings of a service, by name."""
        return dict(self._settings[name])

    def change(self, name: str, **settings: object) -> None:
        """Changes settings for the service's next start; None removes one.

        Settings with parts are merged: only the given parts change.
        """
        had = self._settings[name]
        parts = {key: {**had.get(key, {}), **value} for key, value in settings.items() if isinstance(value, dict)}
        changed = {**had, **settings, **parts}
        self._settings[name] = {key: value for key, value in changed.items() if value is not None}

    def pid(self, name: str) -> int:
        """Returns the process id of a service."""
        return self._processes[name].pid

    def children(self, name: str) -> list[int]:
        """Returns the process ids of a service's own children, which are its front workers."""
        return [child.pid for child, is_fork_server in self._children(name) if not is_fork_server]

    def mask_processes(self) -> list[int]:
        """Returns the process ids of the scheduler's mask processes."""
        servers = [child for child, is_fork_server in self._children("scheduler") if is_fork_server]
        return [child.pid for server in servers for child in running(children_of(server))]

    def wait_for_mask_processes(self) -> None:
        """Waits until both mask processes run.

        They start some seconds after the first runner connects; only then is the memory use of the scheduler's
        processes steady.
        """
        deadline = time.monotonic() + self._ready_s
        while len(self.mask_processes()) < 2:
            assert time.monotonic() < deadline, f"no mask processes within {self._ready_s:g} s\n{self.logs()}"
            time.sleep(0.05)

    def _children(self, name: str) -> list[tuple[psutil.Process, bool]]:
        """Returns pairs (child, whether mask processes are forked from it), without children that have ended."""
        found = []
        for child in psutil.Process(self.pid(name)).children():
            if line := command_line(child):
                found.append((child, MASK_PROCESS in line))
        return found

    def send(self, name: str, number: signal.Signals) -> None:
        """Sends a signal without waiting."""
        self._processes[name].send_signal(number)

    def wait(self, name: str) -> int:
        """Waits for a service that ends by itself; returns its exit status."""
        return self._processes.pop(name).wait(STOP_S)

    def has_ended(self, name: str) -> bool:
        """Whether a service has ended by itself."""
        return self._processes[name].poll() is not None

    def revive(self) -> list[tuple[str, int]]:
        """Restarts every service that has ended by itself; returns their names and exit statuses."""
        ended = [(name, process.returncode) for name, process in self._processes.items() if process.poll() is not None]
        for name, _ in ended:
            self.start_one(name)
        return ended

    def memory_bytes(self, name: str) -> int:
        """Returns the resident memory of a service, child processes included."""
        root = psutil.Process(self.pid(name))
        total = root.memory_info().rss
        for child in root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                total += child.memory_info().rss
        return total

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end (SIGKILL to the group after a timeout); returns the exit status."""
        process = self._processes.pop(name)
        process.send_signal(number)
        try:
            return process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def stop(self) -> dict[str, int]:
        """Ends the services that still run, the scheduler first; returns their exit statuses."""
        return {name: self.end(name) for name in self._settings if name in self._processes}

    def logs(self) -> str:
        """Returns the end of each service's log."""
        paths = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in paths)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            print(self.logs())


def _kind(name: str, settings: Mapping[str, object]) -> fork_server.Kind:
    """Returns what a service's process has imported before it is forked."""
    has_ranks = settings.get("tensor_parallel", 1) != 1
    computes = name != "scheduler" and (has_ranks or settings.get("device") == "cpu")
    return fork_server.Kind.TORCH if computes else fork_server.Kind.PLAIN


@contextmanager
def roster_processes(
    folder: Path,
    *,
    scheduler: Mapping[str, object] | None = None,
    runner: Mapping[str, object] | None = None,
    ready_s: float = READY_S,
    credentials: Credentials = IN_THE_CLEAR,
) -> Iterator[RosterProcesses]:
    """Runs both services; on exit, both must end with status 0."""
    processes = RosterProcesses(folder, scheduler=scheduler, runner=runner, ready_s=ready_s, credentials=credentials)
    with processes:
        yield processes
        assert processes.stop() == {"scheduler": 0, "runner": 0}, processes.logs()
