"""TCP proxy that records when requests and their chunks pass, independently of the clients."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Self

_READ_BYTES = 1 << 16
_TEXT = re.compile(rb'"text":"(?!")')
"""Pattern in a chunk of a streamed completion that has text."""
_OVERLAP = 16
"""Bytes that are searched again, because a match may span two reads."""


@dataclass(slots=True)
class Seen:
    """One request; times are on the machine's clock (`time.time`)."""

    start_s: float
    """Time at which its first byte passed."""
    text_s: list[float] = field(default_factory=list)
    """Times at which a read with one or more text chunks passed."""

    @property
    def ttft_s(self) -> float:
        """Time from the first byte to the first chunk with text. Raises IndexError if none came."""
        return self.text_s[0] - self.start_s


class Witness:
    """Forwards every connection to `port` on this machine; an async context manager."""

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._tasks = set[asyncio.Task[None]]()
        self.seen: list[Seen] = []
        self.began = asyncio.Event()
        """Set when the first completion is requested."""

    @property
    def url(self) -> str:
        """Base URL of the API behind the proxy."""
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        answers, requests = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        connection: list[Seen] = []
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward_requests(reader, requests, connection))
                group.create_task(_forward_answers(answers, writer, connection))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass  # one side has closed the connection
        finally:
            requests.close()
            writer.close()

    async def _forward_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: list[Seen]
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            if data.startswith(b"POST "):
                connection.append(Seen(time.time()))
                self.seen.append(connection[-1])
                self.began.set()
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _forward_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: list[Seen]) -> None:
    rest = b""
    while data := await reader.read(_READ_BYTES):
        window = rest + data
        found = [match.end() for match in _TEXT.finditer(window)]
        if connection and found:
            connection[-1].text_s.append(time.time())
        rest = window[max(len(window) - _OVERLAP, found[-1] if found else 0) :]
        writer.write(data)
        await writer.drain()
    writer.close()
