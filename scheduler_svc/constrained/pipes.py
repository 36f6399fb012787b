"""Two pipes for the frames about masks: a round trip takes at most two thirds of a socket pair's time.

Each end is open in one process only, so that the other process sees EOF when that one is gone. Both ends implement
`frames.Stream`.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable


class AskingPipes:
    """The scheduler's end. Used by one thread at a time.

    Its descriptors are closed only when nothing refers to it any more: a thread that waits on a closed descriptor would
    wait on the next file that gets its number.
    """

    def __init__(self, asks: int, answers: int, limit_s: float, hang_up: socket.socket) -> None:
        """Writes to `asks`, reads from `answers`. `limit_s`: time for a frame and its answer.

        A wait for an answer also ends when the peer closes `hang_up`, a socket to the same process.
        """
        self._asks, self._answers, self._limit_s = asks, answers, limit_s
        self._until_at = 0.0
        os.set_blocking(asks, False)
        self._room, self._ready = select.poll(), select.poll()
        self._room.register(asks, select.POLLOUT)
        self._ready.register(answers, select.POLLIN)
        self._ready.register(hang_up, select.POLLRDHUP)

    def sendall(self, data: bytes) -> None:
        """Sends a frame and starts its time limit.

        Raises BrokenPipeError if the process is gone and has seen nothing of the frame, ConnectionResetError if it
        died after the first bytes, and TimeoutError.
        """
        self._until_at = time.monotonic() + self._limit_s
        sent = os.write(self._asks, data)  # the pipe is empty: the previous frame was answered
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
        """Returns the next bytes of the answer, or b"" if the process is gone. Raises TimeoutError."""
        return os.read(self._answers, most) if self._await(self._ready) == self._answers else b""

    def _await(self, poll: select.poll) -> int:
        """Waits for, and returns, the first ready descriptor. Raises TimeoutError."""
        ready = poll.poll(max(0.0, self._until_at - time.monotonic()) * 1e3)
        if not ready:
            raise TimeoutError
        return ready[0][0]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._asks)
        close(self._answers)


class AnsweringPipes:
    """The mask process's end. Blocks without a timeout."""

    def __init__(self, asks: int, answers: int) -> None:
        """Reads from `asks`, writes to `answers`."""
        self.descriptors = (asks, answers)
        self._asks, self._answers = asks, answers

    def recv(self, most: int) -> bytes:
        """Returns the next bytes of the frame, or b"" if the scheduler is gone."""
        return os.read(self._asks, most)

    def sendall(self, data: bytes) -> None:
        """Sends an answer. Raises BrokenPipeError if the scheduler is gone."""
        sent = os.write(self._answers, data)
        while sent < len(data):
            sent += os.write(self._answers, data[sent:])

    def close(self) -> None:
        """Closes both pipes."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def pipes(limit_s: float, hang_up: socket.socket) -> tuple[AskingPipes, AnsweringPipes]:
    """Returns both ends, which no started program inherits. Raises OSError."""
    asked, asks = os.pipe()
    try:
        answers, answered = os.pipe()
    except OSError:
        os.close(asked)
        os.close(asks)
        raise
    return AskingPipes(asks, answers, limit_s, hang_up), AnsweringPipes(asked, answered)
