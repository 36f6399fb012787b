"""What each front worker process is told at its start."""

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
    """With the addresses in force instead of port 0."""


def start_worker(process: subprocess.Popen[bytes], start: WorkerStart) -> None:
    """Tells a worker process what to do. A process that has died meanwhile hears nothing: its supervisor sees to it."""
    if process.stdin is None:
        raise RuntimeError("the worker's process was started without a pipe")
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(start.model_dump_json().encode() + b"\n")
        process.stdin.flush()
