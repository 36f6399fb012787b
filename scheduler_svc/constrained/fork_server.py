"""The scheduler's end of the process from which all mask processes are forked.

That process holds the vocabulary and receives no client input. A mask process starts within milliseconds because it
shares imports and vocabulary. It shares no client data: only the forked processes receive any.
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
"""Timeout for the process to start, long enough for a machine short of cores."""

START_TRIES = 3
"""Attempts to start a process, after which `fork` gives up."""

_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class MasksUnavailable(Exception):
    """No mask process can be started, or the service is shutting down; the text is a sentence."""


@dataclass(slots=True, frozen=True)
class Limits:
    """Limits of one mask process, enforced by the kernel."""

    spare_bytes: int
    """Memory beyond that of the interpreter and the vocabulary."""
    limit_s: float = 10.0
    """Time for one frame, in seconds."""
    niceness: int = 0
    """Added to the scheduler's own niceness."""


class ForkServer:
    """Fork server of one model. Calls block; thread-safe."""

    def __init__(self, model: plan_pb2.Model) -> None:
        """Starts nothing yet."""
        self._model = model.SerializeToString()
        self._lock = threading.Lock()
        self._closed = False
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def fork(self, role: str, threads: int, limits: Limits, descriptors: list[int]) -> int:
        """Forks a mask process and returns its process id. Raises MasksUnavailable.

        `role` names the process for `ps`. `threads` make the masks of one plan. `descriptors` are its ends of a
        socket and of two pipes, and the shared memory.
        """
        asked = json.dumps({"role": role, "threads": threads, **asdict(limits)}).encode()
        with self._lock:
            for _ in range(START_TRIES):
                self._start()
                if (answer := self._ask(asked, descriptors)) is not None:
                    pid: int = answer["pid"]
                    return pid
        raise MasksUnavailable("no mask process could be started: try again later")

    def wait(self, pid: int, patience_s: float) -> int:
        """Waits `patience_s` for a forked process to end, then kills it; returns its status, negative for a signal."""
        with self._lock:
            answer = self._ask(json.dumps({"wait": pid, "patience_s": patience_s}).encode())
            return -signal.SIGKILL if answer is None else answer["status"]

    def close(self) -> None:
        """Ends the process for good, also while it starts. A forked process ends when its own sockets close."""
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
                stderr=subprocess.DEVNULL,  # the output of a crash may quote client input
                env={name: os.environ[name] for name in _INHERITED if name in os.environ}
                | {"OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            control.close()
            raise MasksUnavailable(f"no mask process can be started: {error}") from error
        finally:
            theirs.close()
        self._control = control
        limit((control,), START_S)
        self._ask(self._model)

    def _ask(self, body: bytes, descriptors: list[int] | None = None) -> dict[str, Any] | None:
        """Returns the answer, or None if the process has died or does not answer in time."""
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
    """Makes sends and receives raise BlockingIOError after `seconds`.

    Uses the kernel's socket timeouts, because `settimeout` adds a poll before each call.
    """
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
