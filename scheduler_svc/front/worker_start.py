"""Starts front workers as processes of their own, and what each is told at its start."""

from __future__ import annotations

import subprocess
import sys

from pydantic import BaseModel

from scheduler_svc.settings import SchedulerSettings


class WorkerStart(BaseModel):
    """The first line of a worker's stdin, as JSON."""

    worker: int
    """Index, from 0."""
    engine_endpoint: str
    """ZeroMQ address of the engine."""
    settings: SchedulerSettings
    """With the addresses in force instead of port 0."""


def start_worker(settings: SchedulerSettings, worker: int, engine_endpoint: str) -> subprocess.Popen[bytes]:
    """Starts a worker process. It ends when the `stdin` of what is returned is closed, or this process dies."""
    process = subprocess.Popen([sys.executable, "-m", "scheduler_svc.front.worker"], stdin=subprocess.PIPE)
    if process.stdin is None:
        raise RuntimeError("a process was started without the pipe that was asked for")
    start = WorkerStart(worker=worker, engine_endpoint=engine_endpoint, settings=settings)
    process.stdin.write(start.model_dump_json().encode() + b"\n")
    process.stdin.flush()
    return process
