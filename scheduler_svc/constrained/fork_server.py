"""The scheduler's end of the process that all mask processes are forked from: it has the vocabulary and sees no client.

A mask process is there within milliseconds, as imports and vocabulary are shared; nothing that a client sent is, since
only what is forked gets it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from roster_protos import plan_pb2
from scheduler_svc.constrained.frames import LENGTH, receive_frame, send_frame

START_S = 60.0
"""Time for the process to come up, where cores are scarce."""

START_TRIES = 3
"""Processes that die in a row while they start, after which what they are needed for is given up."""

_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class MasksUnavailable(Exception):
    """No mask process can be started, or the service ends; the text is a sentence."""


@dataclass(slots=True, frozen=True)
class Limits:
    """Of one mask process, set by its kernel."""

    spare_bytes: int
    """Memory beyond what interpreter and vocabulary take."""
    limit_s: float = 10.0
    """Time for one frame."""
    niceness: int = 0
    """Added to the scheduler's own."""


class ForkServer:
    """Of one model. Blocks; safe to share between threads."""

    def __init__(self, model: plan_pb2.Model) -> None:
        """Starts nothing yet."""
        self._model = model.SerializeToString()
        self._lock = threading.Lock()
        self._closed = False
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def fork(self, role: str, threads: int, limits: Limits, descriptors: list[int]) -> int:
        """Forks a mask process; returns its id. Raises MasksUnavailable.

        `role` is its name for whoever looks at the processes. `threads`: for the masks of one plan. `descriptors`: its
        ends of a socket and of two pipes, and the shared memory.
        """
        asked = json.dumps({"role": role, "threads": threads, **asdict(limits)}).encode()
        with self._lock:
            for _ in range(START_TRIES):
                self._start()
                if (answer := self._ask(asked, descriptors)) is not None:
                    pid: int = answer["pid"]
                    return pid
        raise MasksUnavailable("no process for constraints starts: try again later")

    def wait(self, pid: int, patience_s: float) -> int:
        """Waits so long for the end of a forked process, then kills it; returns its status, negative for a signal."""
        with self._lock:
            answer = self._ask(json.dumps({"wait": pid, "patience_s": patience_s}).encode())
            return -signal.SIGKILL if answer is None else answer["status"]

    def close(self) -> None:
        """Ends the process for good, also while it starts. What it forked ends with its own sockets."""
        self._closed = True
        if self.process is not None:
            self.process.kill()
        with self._lock:
            self._forget()

    def _start(self) -> None:
        if self._closed:
            raise MasksUnavailable("the service is shutting down")
        if self._control is not None:
            return
        control, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scheduler_svc.constrained.process.mask_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what a crash says may quote what a client sent
                env={name: os.environ[name] for name in _INHERITED if name in os.environ}
                | {"OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            control.close()
            raise MasksUnavailable(f"no process for constraints can be started: {error}") from error
        finally:
            theirs.close()
        self._control = control
        limit((control,), START_S)
        self._ask(self._model)

    def _ask(self, body: bytes, descriptors: list[int] | None = None) -> dict[str, Any] | None:
        """The answer; None if the process has died, or does not answer."""
        control = self._control
        if control is None:
            return None
        try:
            if descriptors:
                socket.send_fds(control, [LENGTH.pack(len(body)) + body], descriptors)
            else:
                send_frame(control, body)
            answer = receive_frame(control)
        except OSError:
            answer = None
        if answer is None:
            self._forget()
            return None
        answered: dict[str, Any] = json.loads(answer)
        return answered

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def limit(sockets: Iterable[socket.socket], seconds: float) -> None:
    """Sends and receives raise BlockingIOError after that long. By the kernel: `settimeout` polls before each."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
