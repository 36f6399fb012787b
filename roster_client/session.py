"""Many requests over one bidirectional stream: the cheapest way to ask a lot.

    async with RosterClient("127.0.0.1:50061") as client, client.session() as session:
        completions = await asyncio.gather(*[session.generate(p).completion() for p in prompts])

The server sends one message per flush for all requests together. A session's streams are read as they come and kept in
memory until they are iterated: there is no back-pressure on a single one of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from protos import inference_pb2 as pb

from .errors import RequestCancelledError, RosterError, from_rpc_error, from_status
from .events import AssembledStream, Assembler, Completion, Event
from .requests import Options, Prompt, build_request

_SessionCall = Callable[[AsyncIterator[pb.SessionRequest]], Any]


class SessionStream(AssembledStream):
    """The events of one request of a session, in order: iterate, or await `completion()`."""

    def __init__(self, tag: int, assembler: Assembler, send: Callable[[pb.SessionRequest], None]) -> None:
        super().__init__(assembler)
        self._tag = tag
        self._send = send
        self._arrived: asyncio.Queue[Event | RosterError | None] = asyncio.Queue()
        self._ended = False

    def cancel(self) -> None:
        """Ends the request; its stream goes on to its finishes. Harmless when it has ended."""
        self._send(pb.SessionRequest(tag=self._tag, cancel=pb.SessionCancel()))

    async def completion(self) -> Completion:
        """Reads to the end and returns the whole answer."""
        async for _ in self:
            pass
        return self._assembler.completion

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        event = await self._arrived.get()
        if event is None or isinstance(event, RosterError):
            self._ended = True
            if event is not None:
                raise event
            raise StopAsyncIteration
        return event

    def take(self, response: pb.GenerateResponse) -> None:
        """What the session received for it."""
        try:
            for event in self._assembler.events(response):
                self._arrived.put_nowait(event)
        except RosterError as error:
            self._arrived.put_nowait(error)

    def end(self, error: RosterError | None) -> None:
        """Nothing more comes: it is over, or failed."""
        self._arrived.put_nowait(error)


class Session:
    """One Session call; made by `RosterClient.session()`. Leaving the `async with` cuts what still runs."""

    def __init__(self, call: _SessionCall) -> None:
        self._call_session = call
        self._actions: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._streams: dict[int, SessionStream] = {}
        self._tags = itertools.count(1)
        self._failure: RosterError | None = None

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> SessionStream:
        """Starts a request; see `RosterClient.generate`."""
        request = build_request(prompt, options)
        assembler = Assembler((len(request.received_token_ids),))
        return self._start(assembler, lambda tag: pb.SessionRequest(tag=tag, generate=request))

    def attach(self, request_id: str, received: Sequence[int] = ()) -> SessionStream:
        """Resumes a request's stream; see `RosterClient.attach`."""
        request = pb.AttachRequest(request_id=request_id, received=received)
        return self._start(Assembler(tuple(received)), lambda tag: pb.SessionRequest(tag=tag, attach=request))

    async def __aenter__(self) -> Self:
        self._call = self._call_session(self._requests())
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        self._call.cancel()
        self._fail(RequestCancelledError(grpc.StatusCode.CANCELLED, "the session was closed"))

    def _start(self, assembler: Assembler, action: Callable[[int], pb.SessionRequest]) -> SessionStream:
        tag = next(self._tags)
        stream = SessionStream(tag, assembler, self._actions.put_nowait)
        if self._failure is not None:
            stream.end(self._failure)
            return stream
        self._streams[tag] = stream
        self._actions.put_nowait(action(tag))
        return stream

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while True:
            yield await self._actions.get()

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._dispatch(message)
        except grpc.RpcError as error:
            self._fail(from_rpc_error(error))
        else:
            self._fail(RosterError(grpc.StatusCode.UNAVAILABLE, "the server ended the session"))

    def _dispatch(self, message: pb.SessionResponse) -> None:
        # Acceptances and refusals speak of what comes before the rows, finishes and usages of what comes after.
        for event in message.events:
            if event.WhichOneof("event") in ("accepted", "prompt", "refused"):
                self._event(event)
        for tag, delta in _rows(message):
            if stream := self._streams.get(tag):
                stream.take(pb.GenerateResponse(deltas=[delta]))
        for event in message.events:
            if event.WhichOneof("event") in ("finish", "usage"):
                self._event(event)

    def _event(self, event: pb.SessionEvent) -> None:
        stream = self._streams.get(event.tag)
        if stream is None:
            return
        match event.WhichOneof("event"):
            case "accepted":
                stream.take(pb.GenerateResponse(request_id=event.accepted))
            case "prompt":
                stream.take(pb.GenerateResponse(prompt=event.prompt))
            case "finish":
                stream.take(pb.GenerateResponse(finishes=[event.finish]))
            case "usage":
                stream.take(pb.GenerateResponse(usage=event.usage))
                self._streams.pop(event.tag).end(None)
            case "refused":
                status = event.refused
                self._streams.pop(event.tag).end(from_status(status.code, status.message, status.details))

    def _fail(self, error: RosterError) -> None:
        self._failure = error
        for stream in self._streams.values():
            stream.end(error)
        self._streams.clear()


def _rows(message: pb.SessionResponse) -> Iterator[tuple[int, pb.Delta]]:
    """Each row of a message with its tag, as a delta."""
    rows = len(message.tags)
    indexes = message.indexes or itertools.repeat(0, rows)
    counts = message.token_counts or itertools.repeat(1, rows)
    logprobs = {entry.row: entry.logprobs for entry in message.logprobs}
    token = byte = 0
    columns = zip(message.tags, indexes, message.first_indexes, counts, message.text_lengths, strict=True)
    for row, (tag, index, first_index, count, length) in enumerate(columns):
        yield (
            tag,
            pb.Delta(
                index=index,
                first_index=first_index,
                token_ids=message.token_ids[token : token + count],
                text=message.text[byte : byte + length].decode(),
                logprobs=logprobs.get(row),
            ),
        )
        token += count
        byte += length
