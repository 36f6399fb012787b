"""Supervises the front worker processes: restarts one that dies, at most once a second each."""

from __future__ import annotations

import subprocess
import threading

import structlog

from scheduler_svc.front.worker_process import spawn_worker
from scheduler_svc.front.worker_start import WorkerStart, start_worker
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

RESTART_S = 1.0
"""Interval at which ended workers are restarted, so that one which fails at start does not keep a core busy."""
STOP_S = 5.0
"""Time that a worker has to end after SIGTERM, more than its own `STOP_GRACE_S`."""

log = structlog.get_logger()


class WorkerSupervisor:
    """Starts `settings.front_workers` processes and watches them in a thread."""

    def __init__(
        self, settings: SchedulerSettings, engine_endpoint: str, first_worker: subprocess.Popen[bytes]
    ) -> None:
        """`first_worker`: a spawned process that waits for its start message."""
        self._first = first_worker
        self._settings = settings
        self._endpoint = engine_endpoint
        self._stopping = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._watch, name="worker-supervisor", daemon=True)

    def start(self) -> None:
        spawned = [self._first, *(spawn_worker() for _ in range(1, self._settings.front_workers))]
        self._processes = [self._start(index, process) for index, process in enumerate(spawned)]
        self._thread.start()

    def _start(self, index: int, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        start_worker(process, WorkerStart(worker=index, engine_endpoint=self._endpoint, settings=self._settings))
        return process

    def _watch(self) -> None:
        while not self._stopping.wait(RESTART_S):
            for index, process in enumerate(self._processes):
                if process.poll() is not None and not self._stopping.is_set():
                    log.error("a front worker died: starting it again", worker=index, status=process.returncode)
                    self._processes[index] = self._start(index, spawn_worker())

    def stop(self) -> None:
        """Closes the workers' stdin, which ends them, and waits for them; kills one that does not end in time."""
        self._stopping.set()
        self._thread.join()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
