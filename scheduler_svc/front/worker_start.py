"""The start message of a front worker process."""

from __future__ import annotations

import contextlib
import subprocess

from pydantic import BaseModel

from scheduler_svc.settings.scheduler_settings import SchedulerSettings


class WorkerStart(BaseModel):
    """The first line of a worker's stdin, as JSON."""

    worker: int
    """Index, from 0."""
    engine_endpoint: str
    """ZeroMQ address of the engine."""
    settings: SchedulerSettings
    """The settings, with the bound ports in place of port 0."""


def start_worker(process: subprocess.Popen[bytes], start: WorkerStart) -> None:
    """Sends `start` to a worker process. A process that has died is left to its supervisor."""
    if process.stdin is None:
        raise RuntimeError("the worker process was started without a pipe for stdin; use spawn_worker")
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(start.model_dump_json().encode() + b"\n")
        process.stdin.flush()
