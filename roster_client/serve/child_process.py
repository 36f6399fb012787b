"""Runs a service as a child process, reads its output line by line, and stops it reliably.

The child gets its own process session, so that Ctrl-C reaches only the parent, which then stops its children in order.
If the parent is killed, the child gets SIGTERM (`tied_process.py`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from roster_client.serve import tied_process

TAIL_LINES = 20
_READ_BYTES = 1 << 16

OnLine = Callable[[str, str], None]


class ChildProcess:
    """A running command; each line that it prints is passed to `on_line(name, line)`.

    Progress that ends in a carriage return counts as a line. `tail` has the last lines, to explain an unexpected exit.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: OnLine) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._on_line = on_line
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], on_line: OnLine, environment: Mapping[str, str] | None = None
    ) -> Self:
        """Starts a command with this environment, by default this process's. Raises OSError if that fails.

        The child lives no longer than the calling thread.
        """
        program = shutil.which(command[0])
        if program is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        tied = [sys.executable, "-IS", tied_process.__file__, str(os.getpid()), program, *command[1:]]
        process = await asyncio.create_subprocess_exec(
            *tied,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        return cls(name, process, on_line)

    @property
    def pid(self) -> int:
        """The process id, which is also the process group's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or the negated signal that killed the process; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for the process and returns its exit status."""
        return await self._process.wait()

    async def stop(self, grace_s: float, again_s: float | None = None) -> None:
        """Sends SIGTERM, then SIGKILL to the group after `grace_s` seconds, or at once if this task is cancelled.

        `again_s`: seconds after which SIGTERM is sent again, with which a scheduler gives up running requests.
        """
        if self.returncode is None:
            self._process.terminate()
        try:
            if again_s is not None:
                await asyncio.wait([asyncio.ensure_future(self._process.wait())], timeout=again_s)
                if self.returncode is None:
                    self._process.terminate()
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            await self._kill()
        except asyncio.CancelledError:
            await self._kill()
            raise
        # The last lines arrive at once; a grandchild may keep the pipe open for longer.
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
