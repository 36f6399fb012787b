"""A Session call whose requests are awaited as a whole, with little work per token.

The client's `Session` makes an event of each delta and resumes broken streams, which takes several times the work.
Here a call that breaks fails its requests.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from roster_client.client.errors import RequestCancelledError, RosterError, UnavailableError, from_rpc_error
from roster_client.client.session import taken_from
from roster_protos import inference_pb2 as pb

SessionCall = Callable[[AsyncIterator[pb.SessionRequest]], Any]


class PendingRequest:
    """A request that has not ended."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def end(self, answer: object) -> None:
        """Ends the request with its answer. Has no effect if it has ended."""
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error. Has no effect if it has ended."""
        if not self.answer.done():
            self.answer.set_exception(error)


Pending = TypeVar("Pending", bound=PendingRequest)


class WholeAnswers(ABC, Generic[Pending]):
    """One Session call, used in an `async with`. If it breaks, every request on it fails and `broken` is set."""

    def __init__(self, call: SessionCall) -> None:
        """`call`: the stub's method, with its metadata."""
        self.broken: RosterError | None = None
        self._make_call = call
        self._tags = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        """Requests that have not ended, by tag."""
        self._actions: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._call = self._make_call(taken_from(self._actions))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        self._call.cancel()
        self._actions.put_nowait(None)  # grpc.aio would otherwise read the queue for ever
        self._break(RequestCancelledError(grpc.StatusCode.CANCELLED, "the session was closed"))

    async def _answer(self, request: pb.GenerateRequest, pending: Pending) -> Any:
        """Sends a request and returns the answer with which `pending` is ended. Raises RosterError.

        If the caller is cancelled, so is the request.
        """
        if self.broken is not None:
            raise self.broken
        tag = next(self._tags)
        self._pending[tag] = pending
        self._actions.put_nowait(pb.SessionRequest(tag=tag, generate=request))
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._actions.put_nowait(pb.SessionRequest(tag=tag, cancel=pb.SessionCancel()))
            raise
        finally:
            self._pending.pop(tag, None)

    @abstractmethod
    def _dispatch(self, response: pb.SessionResponse) -> None:
        """Takes what a message has for the requests of `_pending`."""

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._dispatch(response)
            self._break(UnavailableError(grpc.StatusCode.UNAVAILABLE, "the server ended the session"))
        except grpc.RpcError as failure:
            self._break(from_rpc_error(failure))

    def _break(self, error: RosterError) -> None:
        self.broken = self.broken or error
        for pending in self._pending.values():
            pending.fail(error)
