"""A Session stream that collects whole answers, with little work per token.

The client's `Session` makes an event of each delta and resumes broken streams. Here a broken session fails its
requests, which are then sent again as a whole (`bulk_client.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from roster_client.client.errors import (
    RequestCancelledError,
    RosterError,
    StreamGapError,
    UnavailableError,
    from_rpc_error,
    from_status,
)
from roster_client.client.events import Choice, Completion, Started, Usage, finish_of, token_logprobs
from roster_client.client.session import taken_from
from roster_protos import inference_pb2 as pb

SessionCall = Callable[[AsyncIterator[pb.SessionRequest]], Any]


@dataclass(slots=True)
class _Asked:
    """A request that has not ended."""

    completion: Completion
    answer: asyncio.Future[Completion]
    received: int
    """Number of tokens of choice 0 that the request brought along."""

    def choice(self, index: int) -> Choice:
        choices = self.completion.choices
        while len(choices) <= index:
            choices.append(Choice(len(choices)))
        return choices[index]

    def expected(self, choice: Choice) -> int:
        """Returns the number of tokens after which the choice's next ones begin."""
        return len(choice.token_ids) + (self.received if choice.index == 0 else 0)

    def fail(self, error: RosterError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class AnswerSession:
    """One Session call, used in an `async with`. If it breaks, every request on it fails and `broken` is set."""

    def __init__(self, call: SessionCall) -> None:
        """`call`: the stub's method, with its metadata."""
        self._make_call = call
        self._tags = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._actions: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self.broken: RosterError | None = None
        self.tokens_received = 0
        """Number of tokens of all answers so far, unfinished ones included."""
        self.moved_at = time.monotonic()
        """Time of the last token."""

    async def ask(self, request: pb.GenerateRequest) -> Completion:
        """Sends a request and returns its whole answer. Raises RosterError.

        If the caller is cancelled, so is the request.
        """
        if self.broken is not None:
            raise self.broken
        tag = next(self._tags)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked[tag] = _Asked(Completion(), answer, len(request.received_token_ids))
        self._actions.put_nowait(pb.SessionRequest(tag=tag, generate=request))
        try:
            return await answer
        except asyncio.CancelledError:
            self._actions.put_nowait(pb.SessionRequest(tag=tag, cancel=pb.SessionCancel()))
            raise
        finally:
            self._asked.pop(tag, None)

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

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._dispatch(response)
            self._break(UnavailableError(grpc.StatusCode.UNAVAILABLE, "the server ended the session"))
        except grpc.RpcError as failure:
            self._break(from_rpc_error(failure))

    def _break(self, error: RosterError) -> None:
        self.broken = self.broken or error
        for asked in self._asked.values():
            asked.fail(error)

    def _dispatch(self, response: pb.SessionResponse) -> None:
        # Acceptances and refusals come before the message's rows, finishes and usages after them.
        for event in response.events:
            if event.WhichOneof("event") in ("accepted", "prompt", "refused"):
                self._take_event(event)
        self._take_rows(response)
        for event in response.events:
            if event.WhichOneof("event") in ("finish", "usage"):
                self._take_event(event)

    def _take_rows(self, response: pb.SessionResponse) -> None:
        rows, ids, text = len(response.tags), response.token_ids, response.text
        indexes = response.indexes or itertools.repeat(0, rows)
        counts = response.token_counts or itertools.repeat(1, rows)
        logprobs = {entry.row: entry.logprobs for entry in response.logprobs}
        token = byte = 0
        columns = zip(response.tags, indexes, response.first_indexes, counts, response.text_lengths, strict=True)
        for row, (tag, index, first_index, count, length) in enumerate(columns):
            if asked := self._asked.get(tag):
                choice = asked.choice(index)
                if first_index != (expected := asked.expected(choice)):
                    asked.fail(StreamGapError(index, expected, first_index))
                choice.token_ids += ids[token : token + count]
                choice.text += text[byte : byte + length].decode()
                if row in logprobs:
                    choice.logprobs += token_logprobs(logprobs[row])
            token += count
            byte += length
        if rows:
            self.tokens_received += token
            self.moved_at = time.monotonic()

    def _take_event(self, event: pb.SessionEvent) -> None:
        asked = self._asked.get(event.tag)
        if asked is None:
            return
        completion = asked.completion
        match event.WhichOneof("event"):
            case "accepted":
                completion.request_id = event.accepted
                completion.started = Started(event.accepted)
            case "prompt":
                prompt = event.prompt
                ids, logprobs = tuple(prompt.token_ids), token_logprobs(prompt.logprobs)
                completion.started = Started(completion.request_id, ids, logprobs)
            case "finish":
                asked.choice(event.finish.index).finish = finish_of(event.finish)
            case "usage":
                usage = event.usage
                completion.usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
                if not asked.answer.done():
                    asked.answer.set_result(completion)
            case "refused":
                status = event.refused
                asked.fail(from_status(status.code, status.message, status.details))
