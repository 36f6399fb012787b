"""Many requests over one bidirectional stream, which costs the least per request.

    async with RosterClient("127.0.0.1:50061") as client, client.session() as session:
        completions = await asyncio.gather(*[session.generate(p).completion() for p in prompts])

A broken session is reopened, and each of its streams resumes where it was (see `resumption.py`).

The server sends one message per flush for all requests together. Events are buffered in memory until their stream is
iterated over: a single stream has no backpressure.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from roster_client.client.errors import (
    RequestCancelledError,
    RosterError,
    UnavailableError,
    from_rpc_error,
    from_status,
)
from roster_client.client.events import AssembledStream, Assembler, Completion, Event
from roster_client.client.requests import Options, Prompt, build_request
from roster_client.client.resumption import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    RECONNECT_S,
    NextCall,
    Resumption,
    Retry,
    is_broken,
    repeatable,
)
from roster_protos import inference_pb2 as pb

_SessionCall = Callable[[AsyncIterator[pb.SessionRequest]], Any]


class SessionStream(AssembledStream):
    """The events of one request of a session, in order: iterate over it, or await `completion()`."""

    def __init__(
        self, tag: int, assembler: Assembler, resumption: Resumption, send: Callable[[pb.SessionRequest], None]
    ) -> None:
        super().__init__(assembler)
        self.tag = tag
        """The stream's tag in the session; changes when the stream resumes."""
        self.resumption = resumption
        self._send = send
        self._arrived: asyncio.Queue[Event | RosterError | None] = asyncio.Queue()
        self._ended = False

    def cancel(self) -> None:
        """Cancels the request; its stream continues to its finishes. Has no effect if it has ended."""
        self._send(pb.SessionRequest(tag=self.tag, cancel=pb.SessionCancel()))

    async def completion(self) -> Completion:
        """Reads the stream to its end and returns the whole answer."""
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
        """Takes a message that the session received for this stream."""
        self.resumption.progress()
        try:
            for event in self._assembler.events(response):
                self._arrived.put_nowait(event)
        except RosterError as error:
            self._arrived.put_nowait(error)

    def end(self, error: RosterError | None) -> None:
        """Ends the stream, with an error if it failed."""
        self._arrived.put_nowait(error)


class Session:
    """One Session call, from `RosterClient.session()`. Leaving the `async with` closes unfinished streams."""

    def __init__(self, call: _SessionCall, reconnect_s: float = RECONNECT_S) -> None:
        """`reconnect_s`: seconds for which a broken session tries to reconnect."""
        self._call_session = call
        self._reconnect_s = reconnect_s
        self._streams: dict[int, SessionStream] = {}
        self._tags = itertools.count(1)
        self._failure: RosterError | None = None
        self._actions: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()

    def generate(self, prompt: Prompt, *, raw: bool = False, **options: Unpack[Options]) -> SessionStream:
        """Starts a request; arguments as those of `RosterClient.generate`."""
        return self.send(build_request(prompt, options, raw=raw))

    def send(self, request: pb.GenerateRequest) -> SessionStream:
        """Starts a request from its message."""
        request = repeatable(request)
        return self._start(
            Assembler((len(request.received_token_ids),)), request, lambda: pb.SessionRequest(generate=request)
        )

    def attach(self, request_id: str, received: Sequence[int] = ()) -> SessionStream:
        """Resumes a request's stream; arguments as those of `RosterClient.attach`."""
        request = pb.AttachRequest(request_id=request_id, received=received)
        return self._start(Assembler(tuple(received)), None, lambda: pb.SessionRequest(attach=request))

    async def __aenter__(self) -> Self:
        self._open()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        self._call.cancel()
        self._fail(RequestCancelledError(grpc.StatusCode.CANCELLED, "the session was closed"))

    def _start(
        self, assembler: Assembler, request: pb.GenerateRequest | None, action: Callable[[], pb.SessionRequest]
    ) -> SessionStream:
        resumption = Resumption(assembler, request, patience_s=self._reconnect_s)
        stream = SessionStream(next(self._tags), assembler, resumption, self._act)
        if self._failure is not None:
            stream.end(self._failure)
            return stream
        self._streams[stream.tag] = stream
        message = action()
        message.tag = stream.tag
        self._actions.put_nowait(message)
        return stream

    def _act(self, message: pb.SessionRequest) -> None:
        self._actions.put_nowait(message)

    # ------------------------------------------------------------------ connections

    def _open(self) -> None:
        """Makes a new call with its own queue, so that unsent messages of the broken call are not sent later.

        The None ends the old queue, which grpc.aio would otherwise read forever.
        """
        self._actions.put_nowait(None)
        self._actions = asyncio.Queue()
        self._call = self._call_session(taken_from(self._actions))

    async def _read(self) -> None:
        pause_s, broken_s = FIRST_PAUSE_S, None
        while True:
            try:
                async for message in self._call:
                    pause_s, broken_s = FIRST_PAUSE_S, None
                    self._dispatch(message)
                error: RosterError = UnavailableError(grpc.StatusCode.UNAVAILABLE, "the server ended the session")
            except grpc.RpcError as failure:
                error = from_rpc_error(failure)
            broken_s = broken_s or time.monotonic()
            if not is_broken(error) or time.monotonic() - broken_s >= self._reconnect_s:
                self._fail(error)
                return
            streams, self._streams = list(self._streams.values()), {}
            self._open()
            for stream in streams:
                self._take_up(stream, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _take_up(self, stream: SessionStream, error: RosterError) -> None:
        """Resumes a stream after an error, or ends it with the error."""
        try:
            retry = stream.resumption.after(error)
        except RosterError:
            stream.end(error)
            return
        self._send_again(stream, retry)

    def _send_again(self, stream: SessionStream, retry: Retry) -> None:
        stream.tag = next(self._tags)
        self._streams[stream.tag] = stream
        if retry.call is NextCall.ATTACH:
            message = pb.SessionRequest(tag=stream.tag, attach=stream.resumption.attach_request())
        else:
            message = pb.SessionRequest(tag=stream.tag, generate=stream.resumption.generate_request())
        actions = self._actions
        asyncio.get_running_loop().call_later(retry.pause_s, actions.put_nowait, message)

    def _dispatch(self, message: pb.SessionResponse) -> None:
        # Acceptances and refusals come before the message's rows, finishes and usages after them.
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
            case "accepted" if stream.resumption.attach_when_accepted:
                del self._streams[event.tag]
                self._send_again(stream, stream.resumption.accepted())
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
                self._take_up(self._streams.pop(event.tag), from_status(status.code, status.message, status.details))

    def _fail(self, error: RosterError) -> None:
        self._failure = error
        for stream in self._streams.values():
            stream.end(error)
        self._streams.clear()


async def taken_from(actions: asyncio.Queue[pb.SessionRequest | None]) -> AsyncIterator[pb.SessionRequest]:
    """Yields the messages that a Session call sends: those of the queue up to None."""
    while (message := await actions.get()) is not None:
        yield message


def _rows(message: pb.SessionResponse) -> Iterator[tuple[int, pb.Delta]]:
    """Yields each row of a message as its tag and a delta."""
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
