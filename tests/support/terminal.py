"""A command on a pseudo-terminal: tests send keys and read the drawn text."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from types import TracebackType
from typing import Self

_ESCAPES = re.compile(r"\x1b(\[[\d;?]*[a-zA-Z]|\][^\x07]*\x07|[()][A-Z0-9])")


class TerminalCommand:
    """`roster` with these arguments on a pseudo-terminal of 120 × 40."""

    def __init__(self, *arguments: str) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.modes = termios.tcgetattr(self._slave)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("ROSTER_", "COLUMNS"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "roster_client.cli", *arguments],
            env=inherited | {"TERM": "xterm", "OMP_NUM_THREADS": "1"},
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
        )
        self._drawn = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def drawn(self) -> str:
        """Everything drawn so far, without escape sequences."""
        return _ESCAPES.sub("", self._drawn.decode(errors="replace"))

    def wait_for(self, pattern: str, timeout_s: float = 60) -> re.Match[str]:
        """Waits until the drawn text matches, and returns the last match."""
        deadline = time.monotonic() + timeout_s
        while True:
            matches = list(re.finditer(pattern, self.drawn))
            if matches:
                return matches[-1]
            assert time.monotonic() < deadline, f"{pattern!r} was not drawn within {timeout_s} s:\n{self.drawn[-6000:]}"
            time.sleep(0.05)

    def press(self, keys: str) -> None:
        """Sends keys."""
        os.write(self._master, keys.encode())

    def modes_now(self) -> list[object]:
        """Returns the terminal's modes, to compare with `modes`."""
        return termios.tcgetattr(self._slave)

    def exit_status(self, timeout_s: float = 60) -> int:
        """Waits for the end; returns the exit status."""
        return self.process.wait(timeout_s)

    def _read(self) -> None:
        while True:
            try:
                self._drawn += os.read(self._master, 1 << 16)
            except OSError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._slave)
        self._reader.join(10)
        os.close(self._master)
