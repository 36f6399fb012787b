"""A Session stream for load generators: reads only each request's number of tokens from a flush.

The client's `Session` builds events with texts and ids and resumes broken streams, which takes several times the work
per token. A load generator must not become the bottleneck of its measurement.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from roster_client.bench.load.target import Answer, RequestFailed, Take, status_of
from roster_client.bench.records.record import Status
from roster_client.client.errors import from_rpc_error, from_status
from roster_client.client.events import FinishReason
from roster_client.client.session import taken_from
from roster_protos import inference_pb2 as pb

ENDINGS = {
    FinishReason.DEADLINE: Status.TIMEOUT,
    FinishReason.CANCELLED: Status.FAILED,
    FinishReason.ERROR: Status.FAILED,
    FinishReason.UNAVAILABLE: Status.FAILED,
}


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    take: Take
    answer: asyncio.Future[Answer]


class TokenSession:
    """One Session call, used in an `async with`. If it breaks, every request on it fails."""

    def __init__(self, call: Callable[[AsyncIterator[pb.SessionRequest]], Any]) -> None:
        """`call`: the stub's method, with its metadata."""
        self._make_call = call
        self._tags = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._actions: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._broken: RequestFailed | None = None

    async def serve(self, message: pb.GenerateRequest, take: Take) -> Answer:
        """Sends a request and waits until it ends. Raises RequestFailed."""
        if self._broken is not None:
            raise self._broken
        tag = next(self._tags)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[tag] = _Open(take, answer)
        self._actions.put_nowait(pb.SessionRequest(tag=tag, generate=message))
        try:
            return await answer
        except asyncio.CancelledError:
            self._actions.put_nowait(pb.SessionRequest(tag=tag, cancel=pb.SessionCancel()))
            raise
        finally:
            self._open.pop(tag, None)

    async def __aenter__(self) -> Self:
        self._call = self._make_call(taken_from(self._actions))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        self._call.cancel()

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._dispatch(response)
            self._broken = RequestFailed(Status.FAILED, "the server ended the session")
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
            self._broken = RequestFailed(status_of(error), str(error))
        for one in self._open.values():
            _fail(one, self._broken)

    def _dispatch(self, response: pb.SessionResponse) -> None:
        counts = response.token_counts or itertools.repeat(1, len(response.tags))
        for tag, count in zip(response.tags, counts, strict=True):
            if one := self._open.get(tag):
                one.take(count)
        for event in response.events:
            if one := self._open.get(event.tag):
                _take_event(one, event)


def _take_event(one: _Open, event: pb.SessionEvent) -> None:
    match event.WhichOneof("event"):
        case "finish":
            reason = FinishReason(event.finish.reason)
            if reason in ENDINGS:
                _fail(one, RequestFailed(ENDINGS[reason], event.finish.message or f"ended: {reason.name.lower()}"))
        case "usage" if not one.answer.done():
            usage = event.usage
            one.answer.set_result(Answer(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens))
        case "refused":
            refused = event.refused
            error = from_status(refused.code, refused.message, refused.details)
            _fail(one, RequestFailed(status_of(error), str(error)))


def _fail(one: _Open, error: RequestFailed) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
