"""Standard streams that may be closed, or lie on a full disk.

A service goes on without them: what it would have printed is lost. A command ends, because its output is its result.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any


class OutputLost(Exception):
    """Standard output can't be written; the message is one sentence."""


class ForgivingStream:
    """A text stream whose errors are ignored; everything else is the wrapped stream's."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, stream: Any) -> None:
        """`stream`: None, which Python puts in place of a closed one, swallows everything."""
        self._stream = stream
        if stream is not None and getattr(stream, "encoding", None):
            self.encoding, self.errors = stream.encoding, stream.errors

    def write(self, text: str) -> int:
        """Writes `text` where that is possible; returns its length."""
        if not isinstance(text, str):
            raise TypeError(f"text is written here, not {type(text).__name__}")
        if not text:  # typer writes "" to find out whether a stream takes text
            return 0
        try:
            if self._stream is None:
                raise OSError(errno.EBADF, "it is closed")
            self._stream.write(text)
        except (OSError, UnicodeError) as error:
            self._failed(error)
        except ValueError as error:  # a file object that was closed
            if not getattr(self._stream, "closed", False):
                raise
            self._failed(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes the stream where that is possible."""
        if self._stream is None or getattr(self._stream, "closed", False):
            return
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def isatty(self) -> bool:
        """Returns whether it is a terminal; a closed stream is none."""
        return self._stream is not None and not getattr(self._stream, "closed", False) and bool(self._stream.isatty())

    def fileno(self) -> int:
        """Returns the descriptor. Raises io.UnsupportedOperation if there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return int(self._stream.fileno())

    def _failed(self, error: Exception) -> None:
        """Ignores the error."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_stream"], name)


class CommandOutput(ForgivingStream):
    """Standard output of a command: the first error raises OutputLost, further ones are ignored.

    A closed pipe (`roster ... | head`) raises BrokenPipeError as usual.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._lost = False

    def _failed(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        if not self._lost:
            self._lost = True
            reason = getattr(error, "strerror", None) or str(error)
            raise OutputLost(f"Standard output can't be written ({reason}): the output is lost.") from error


def forgive_output() -> None:
    """Makes standard output and standard error forgiving: for services, which outlive them."""
    _hold_descriptors()
    sys.stdout = ForgivingStream(_wrapped(sys.stdout))  # type: ignore[assignment]
    sys.stderr = ForgivingStream(_wrapped(sys.stderr))  # type: ignore[assignment]


def guard_output() -> None:
    """Makes standard output raise OutputLost, and standard error forgiving: for commands."""
    _hold_descriptors()
    sys.stdout = CommandOutput(_wrapped(sys.stdout))  # type: ignore[assignment]
    sys.stderr = ForgivingStream(_wrapped(sys.stderr))  # type: ignore[assignment]


def forgiving_stderr() -> Any:
    """Returns standard error, made forgiving."""
    return sys.stderr if isinstance(sys.stderr, ForgivingStream) else ForgivingStream(sys.stderr)


def _wrapped(stream: Any) -> Any:
    return stream._stream if isinstance(stream, ForgivingStream) else stream


def _hold_descriptors() -> None:
    """Opens /dev/null as each standard descriptor that is closed, so that no socket or file becomes one."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
