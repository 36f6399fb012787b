"""The scheduler's end of one mask process: starts it, asks it, and starts another when it has died.

Blocks, so it must not be called by the engine's thread. Several threads may ask, one a channel at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import structlog

from protos import plan_pb2
from scheduler_svc.constrained.frames import receive_frame, send_frame

START_S = 60.0
"""Time for a process to come up, where cores are scarce."""

START_TRIES = 3
"""Processes that die in a row while they start, after which what they are needed for is given up."""

GRACE_S = 5.0
"""Beyond its limit, for a process to end itself."""

_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")

log = structlog.get_logger()


class Channel(IntEnum):
    """What is asked; each has a thread of its own in the process."""

    GRAMMARS = 0
    MASKS = 1


class Died(Exception):
    """The process that was asked has died; `status` is its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status

    @property
    def may_be_chance(self) -> bool:
        """Somebody killed it, or what it held besides left too little memory: a fresh one may answer."""
        return self.status in (-signal.SIGKILL, -signal.SIGABRT) or self.status > 0

    def __str__(self) -> str:
        if self.status == -signal.SIGALRM:
            return "it takes too long"
        if self.status == -signal.SIGABRT or self.status > 0:
            return "it takes too much memory, or breaks the grammar library"
        return "it breaks the grammar library"


class DiedBefore(Died):
    """It had died before it was asked."""


class MasksUnavailable(Exception):
    """No mask process can be started, or the service ends; the text is a sentence."""


@dataclass(slots=True, frozen=True)
class Limits:
    """Of one process, set by its kernel."""

    spare_bytes: int
    """Memory beyond what interpreter and vocabulary take."""
    limit_s: float = 10.0
    """Time for one frame."""
    niceness: int = 0
    """Added to the scheduler's own."""


@dataclass(slots=True, eq=False)
class _Running:
    process: subprocess.Popen[bytes]
    sockets: tuple[socket.socket, socket.socket]

    def end(self, patience_s: float = 0.0) -> int:
        """Waits so long for its end, then kills it; returns the status that it ended with."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.process.kill()
        for each in self.sockets:
            each.close()
        return self.process.wait()


class MaskHandle:
    """One process, and those that follow it when it dies."""

    def __init__(self, role: str, model: plan_pb2.Model, threads: int, limits: Limits) -> None:
        """`role` is for the log. `threads`: for the masks of one plan. Starts nothing yet."""
        self._role = role
        self._model = model.SerializeToString()
        self._threads = threads
        self._limits = limits
        self._memory = -1
        self._masks = mmap.mmap(-1, mmap.PAGESIZE)
        self._size = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._running: _Running | None = None
        self._starting = threading.Lock()
        self._turns = tuple(threading.Lock() for _ in Channel)
        self._closed = False
        self._generation = 0
        self.deaths = 0
        """Processes that ended by themselves, or were killed."""

    @property
    def pid(self) -> int | None:
        """Of the process, if one runs."""
        running = self._running
        return running.process.pid if running is not None else None

    def start(self) -> int:
        """Starts a process if none runs; returns the number of the one that runs. Raises MasksUnavailable."""
        with self._starting:
            if self._closed:
                raise MasksUnavailable("the service is shutting down")
            if self._running is not None and self._running.process.poll() is not None:
                self._end(self._running, 0.0)
            tries = 0
            while self._running is None:
                tries += 1
                try:
                    self._running = self._spawn()
                    self._generation += 1
                except MasksUnavailable:
                    self.deaths += 1
                    if self._closed or tries == START_TRIES:
                        raise
            return self._generation

    def ask(self, channel: Channel, generation: int, body: bytes, *, alone: bool = False) -> bytes:
        """The answer to one frame. `alone`: nothing else is asked meanwhile.

        Raises Died if the process of this number has died, before or over this.
        """
        with self._all_turns() if alone else self._turns[channel]:
            running = self._running
            if running is None or generation != self._generation:
                raise DiedBefore(-signal.SIGKILL)
            patience_s = GRACE_S  # its sockets are closed: so is the rest of it, in a moment
            try:
                send_frame(running.sockets[channel], body)
                answer = receive_frame(running.sockets[channel])
            except BlockingIOError:  # its time is over
                answer, patience_s = None, 0.0
            except OSError:
                answer = None
            if answer is None:
                raise Died(self._bury(generation, patience_s))
            return answer

    def reserve(self, num_bytes: int) -> None:
        """Makes the shared memory at least so large."""
        if num_bytes > self._size:
            size = -(-max(num_bytes, 2 * self._size) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._memory, size)
            self._masks, self._size = mmap.mmap(self._memory, size, prot=mmap.PROT_READ), size

    @property
    def memory(self) -> mmap.mmap | bytes:
        """The shared memory: a slice of it is a copy."""
        return self._masks

    def close(self) -> None:
        """Ends the process for good."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # also one that is being started
        with self._starting:
            running, self._running = self._running, None
            if running is not None:
                running.end()
            if self._memory >= 0:
                os.close(self._memory)
                self._memory, self._size = -1, 0

    @contextlib.contextmanager
    def _all_turns(self) -> Iterator[None]:
        with self._turns[Channel.GRAMMARS], self._turns[Channel.MASKS]:
            yield

    def _spawn(self) -> _Running:
        if self._memory < 0:
            self._memory = os.memfd_create("roster-masks")
        pairs = [socket.socketpair() for _ in Channel]
        ours, theirs = tuple(pair[0] for pair in pairs), [pair[1] for pair in pairs]
        descriptors = [*(each.fileno() for each in theirs), self._memory]
        limits = self._limits
        values = [self._role, *descriptors, self._threads, limits.spare_bytes, limits.niceness, limits.limit_s]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "scheduler_svc.constrained.mask_process", *map(str, values)],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what a crash says may quote what a client sent
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                pass_fds=descriptors,
            )
        except OSError as error:
            raise MasksUnavailable(f"no process for constraints can be started: {error}") from error
        finally:
            for each in theirs:
                each.close()
        self._process = process
        running = _Running(process, (ours[0], ours[1]))
        try:
            _limit(ours, START_S)
            send_frame(ours[Channel.GRAMMARS], self._model)
            answer = receive_frame(ours[Channel.GRAMMARS])
        except OSError:
            answer = None
        if answer is None:
            status = running.end()
            raise MasksUnavailable(f"the process for constraints did not start (status {status}): try again later")
        _limit(ours, self._limits.limit_s + GRACE_S)
        return running

    def _bury(self, generation: int, patience_s: float) -> int:
        """The process of this number is dead, or will be; returns its status."""
        with self._starting:
            running = self._running
            if running is None or generation != self._generation:
                return -signal.SIGKILL  # another thread has seen it
            return self._end(running, patience_s)

    def _end(self, running: _Running, patience_s: float) -> int:
        self._running = None
        status = running.end(patience_s)
        if not self._closed:
            self.deaths += 1
            log.error("a mask process died: starting another", role=self._role, status=status)
        return status


def _limit(sockets: Iterable[socket.socket], seconds: float) -> None:
    """Sends and receives raise BlockingIOError after that long. By the kernel: `settimeout` polls before each."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
