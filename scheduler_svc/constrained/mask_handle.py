"""The scheduler's end of one mask process: starts it, sends it requests, and restarts it after it has died.

Calls block, so the engine's thread must make none. Several threads may send requests, one per channel at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import structlog

from scheduler_svc.constrained.fork_server import ForkServer, Limits, MasksUnavailable, limit
from scheduler_svc.constrained.frames import Stream, receive_frame, send_frame
from scheduler_svc.constrained.pipes import AskingPipes, pipes

GRACE_S = 5.0
"""Time beyond its limit in which a process must end by itself."""

log = structlog.get_logger()


class Channel(IntEnum):
    """Kind of a request; each kind has a thread of its own in the process."""

    GRAMMARS = 0
    MASKS = 1


class Died(Exception):
    """The process died during the request; `status` is its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status

    @property
    def may_be_chance(self) -> bool:
        """Whether a fresh process may answer: this one was killed from outside, or other data used up its memory."""
        return self.status in (-signal.SIGKILL, -signal.SIGABRT) or self.status > 0

    def __str__(self) -> str:
        if self.status == -signal.SIGALRM:
            return "it takes too long"
        if self.status == -signal.SIGABRT or self.status > 0:
            return "it takes too much memory, or crashes the grammar library"
        return "it crashes the grammar library"


class DiedBefore(Died):
    """The process had died before the request."""


@dataclass(slots=True, eq=False)
class _Running:
    pid: int
    grammars: socket.socket
    masks: AskingPipes
    has_answered: bool = False
    _ends: select.poll = field(default_factory=select.poll)

    def __post_init__(self) -> None:
        self._ends.register(self.grammars, select.POLLRDHUP)

    @property
    def has_hung_up(self) -> bool:
        """Whether it has closed its socket: it is dead, or about to be."""
        return bool(self._ends.poll(0))

    def close(self) -> None:
        """Shuts the socket down: pending requests get no answer, and the process ends when it notices."""
        with contextlib.suppress(OSError):
            self.grammars.shutdown(socket.SHUT_RDWR)
        self.grammars.close()


class MaskHandle:
    """One mask process, and its successors when it dies."""

    def __init__(self, role: str, server: ForkServer, threads: int, limits: Limits) -> None:
        """Starts no process yet. `role` is its name; `server` forks it; `threads` make the masks of one plan."""
        self._role = role
        self._server = server
        self._threads = threads
        self._limits = limits
        self._memory = -1
        self._masks = mmap.mmap(-1, mmap.PAGESIZE)
        self._size = 0
        self._running: _Running | None = None
        self._starting = threading.Lock()
        self._turns = tuple(threading.Lock() for _ in Channel)
        self._closed = False
        self._generation = 0
        self.deaths = 0
        """Number of processes that ended by themselves or were killed."""

    @property
    def running(self) -> int:
        """Generation of the process that runs, as far as is known; 0 if none does."""
        return self._generation if self._running is not None else 0

    @property
    def pid(self) -> int | None:
        """Process id; None if no process runs."""
        running = self._running
        return running.pid if running is not None else None

    def start(self) -> int:
        """Starts a process if none runs; returns the generation of the running one. Raises MasksUnavailable."""
        with self._starting:
            if self._closed:
                raise MasksUnavailable("the service is shutting down")
            if self._running is not None and self._running.has_hung_up:
                self._end(self._running, GRACE_S)
            if self._running is None:
                running = self._fork()
                self._generation += 1  # before another thread sees the process
                self._running = running
            return self._generation

    def ask(
        self,
        channel: Channel,
        generation: int,
        body: bytes,
        *,
        alone: bool = False,
        meanwhile: Callable[[], None] | None = None,
    ) -> bytes:
        """Sends one frame and returns the answer. `meanwhile` is called before the wait.

        `alone` holds back all other requests until then. Raises Died if the process of this generation has died,
        before or during the request.
        """
        with self._all_turns() if alone else self._turns[channel]:
            running = self._running
            if running is None or generation != self._generation:
                raise DiedBefore(-signal.SIGKILL)
            patience_s = GRACE_S  # when its ends are closed, the process is about to end
            stream: Stream = running.masks if channel is Channel.MASKS else running.grammars
            try:
                send_frame(stream, body)
                if meanwhile is not None:
                    meanwhile()
                answer = receive_frame(stream)
            except (BlockingIOError, TimeoutError):  # it has exceeded its time limit
                answer, patience_s = None, 0.0
            except BrokenPipeError as error:
                status = self._bury(generation, patience_s)
                # The pipe shows that the process saw nothing. Retries must end, though, if each process dies at once.
                if stream is running.masks and running.has_answered:
                    raise DiedBefore(status) from error
                raise Died(status) from error
            except OSError:
                answer = None
            if answer is None:
                raise Died(self._bury(generation, patience_s))
            running.has_answered = True
            return answer

    def reserve(self, num_bytes: int) -> None:
        """Makes the shared memory at least `num_bytes` large."""
        if num_bytes > self._size:
            size = -(-max(num_bytes, 2 * self._size) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._memory, size)
            self._masks, self._size = mmap.mmap(self._memory, size, prot=mmap.PROT_READ), size

    @property
    def memory(self) -> mmap.mmap | bytes:
        """Shared memory; a slice of it is a copy."""
        return self._masks

    def close(self) -> None:
        """Ends the process for good."""
        self._closed = True
        with self._starting:
            running, self._running = self._running, None
            if running is not None:
                running.close()
            if self._memory >= 0:
                os.close(self._memory)
                self._memory, self._size = -1, 0

    @contextlib.contextmanager
    def _all_turns(self) -> Iterator[None]:
        with self._turns[Channel.GRAMMARS], self._turns[Channel.MASKS]:
            yield

    def _fork(self) -> _Running:
        if self._memory < 0:
            self._memory = os.memfd_create("roster-masks")
        limit_s = self._limits.limit_s + GRACE_S
        with contextlib.ExitStack() as theirs:
            grammars, answering = socket.socketpair()
            theirs.enter_context(answering)
            masks, making = pipes(limit_s, grammars)
            theirs.callback(making.close)
            descriptors = [answering.fileno(), *making.descriptors, self._memory]
            pid = self._server.fork(self._role, self._threads, self._limits, descriptors)
        limit((grammars,), limit_s)
        return _Running(pid, grammars, masks)

    def _bury(self, generation: int, patience_s: float) -> int:
        """Returns the status of the process of this generation, which is dead or about to be."""
        with self._starting:
            running = self._running
            if running is None or generation != self._generation:
                return -signal.SIGKILL  # another thread has handled this death
            return self._end(running, patience_s)

    def _end(self, running: _Running, patience_s: float) -> int:
        self._running = None
        status = self._server.wait(running.pid, patience_s)
        running.close()
        if not self._closed:
            self.deaths += 1
            log.error("a mask process died: starting another", role=self._role, status=status)
        return status
