"""A service as a child process: its output line by line, and an end that is sure.

The child gets a session of its own, so that Ctrl-C reaches only the parent, which then stops its children in order.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

TAIL_LINES = 20
_READ_BYTES = 1 << 16

OnLine = Callable[[str, str], None]


class ChildProcess:
    """A running command; each line that it prints goes to `on_line(name, line)`.

    Progress that ends in a carriage return counts as a line. The last lines are kept in `tail`, to explain a death.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: OnLine) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._on_line = on_line
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, command: Sequence[str], on_line: OnLine) -> Self:
        """Starts a command with this process's environment. Raises OSError if it can't be started."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        return cls(name, process, on_line)

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's too."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status (minus the signal that killed it); None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for its end and returns its exit status."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its group after `grace_s` seconds, or at once if the waiting task is cancelled."""
        if self.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            await self._kill()
        except asyncio.CancelledError:
            await self._kill()
            raise
        # Its last lines come at once; a grandchild that holds the pipe open is not worth waiting for.
        await asyncio.wait({self._reader}, timeout=1)
        self._reader.cancel()

    async def _kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()

    async def _read(self) -> None:
        output = self._process.stdout
        if output is None:
            raise RuntimeError(f"{self.name} was started without a pipe")
        rest = b""
        while data := await output.read(_READ_BYTES):
            *lines, rest = re.split(rb"[\r\n]+", rest + data)
            for line in lines:
                self._emit(line)
        self._emit(rest)

    def _emit(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            self.tail.append(text)
            self._on_line(self.name, text)
