"""The frames about masks go over two pipes, whose round trip takes two thirds of the time of a socket pair's, or less.

Each end is held by one process alone, so that the other sees it go: the process that makes masks reads no more when the
scheduler is gone, and the scheduler when that process is. Both are streams as `frames` takes them.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable


class AskingPipes:
    """The scheduler's end. Belongs to one thread at a time.

    Its descriptors are closed when nothing refers to it any more: another thread that waits on one that was closed
    would wait on whatever has its number next.
    """

    def __init__(self, asks: int, answers: int, limit_s: float, hang_up: socket.socket) -> None:
        """Writes to `asks`, reads from `answers`. `limit_s`: for a frame and its answer.

        The end of `hang_up`, a socket to the same process, also ends the wait for an answer.
        """
        self._asks, self._answers, self._limit_s = asks, answers, limit_s
        self._until_at = 0.0
        os.set_blocking(asks, False)
        self._room, self._ready = select.poll(), select.poll()
        self._room.register(asks, select.POLLOUT)
        self._ready.register(answers, select.POLLIN)
        self._ready.register(hang_up, select.POLLRDHUP)

    def sendall(self, data: bytes) -> None:
        """Sends a frame; its time begins.

        Raises BrokenPipeError if the process is gone and has seen nothing of it, ConnectionResetError if it has gone
        since, and TimeoutError.
        """
        self._until_at = time.monotonic() + self._limit_s
        sent = os.write(self._asks, data)  # the pipe is empty: the frame before was answered
        if sent < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, data: memoryview) -> None:
        try:
            while data:
                self._await(self._room)
                data = data[os.write(self._asks, data) :]
        except BrokenPipeError as error:
            raise ConnectionResetError from error

    def recv(self, most: int) -> bytes:
        """The next bytes of the answer, b"" when the process is gone. Raises TimeoutError."""
        return os.read(self._answers, most) if self._await(self._ready) == self._answers else b""

    def _await(self, poll: select.poll) -> int:
        """The first descriptor that is ready."""
        ready = poll.poll(max(0.0, self._until_at - time.monotonic()) * 1e3)
        if not ready:
            raise TimeoutError
        return ready[0][0]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._asks)
        close(self._answers)


class AnsweringPipes:
    """The end of the process that makes masks. Waits as long as it takes."""

    def __init__(self, asks: int, answers: int) -> None:
        """Reads from `asks`, writes to `answers`."""
        self.descriptors = (asks, answers)
        self._asks, self._answers = asks, answers

    def recv(self, most: int) -> bytes:
        """The next bytes of the frame, b"" when the scheduler is gone."""
        return os.read(self._asks, most)

    def sendall(self, data: bytes) -> None:
        """Sends an answer. Raises BrokenPipeError when the scheduler is gone."""
        sent = os.write(self._answers, data)
        while sent < len(data):
            sent += os.write(self._answers, data[sent:])

    def close(self) -> None:
        """Closes both."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def pipes(limit_s: float, hang_up: socket.socket) -> tuple[AskingPipes, AnsweringPipes]:
    """Both ends, of which no other program that is started gets any. Raises OSError."""
    asked, asks = os.pipe()
    try:
        answers, answered = os.pipe()
    except OSError:
        os.close(asked)
        os.close(asks)
        raise
    return AskingPipes(asks, answers, limit_s, hang_up), AnsweringPipes(asked, answered)
