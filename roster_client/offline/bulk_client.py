"""Sends many requests over one session, as many at a time as the server admits, until each has its answer.

| answer of the server | what follows |
|---|---|
| RESOURCE_EXHAUSTED: its queue is full | the request is sent again when there is room (`window.py`) |
| UNAVAILABLE, a broken connection, a choice that ended with UNAVAILABLE | the whole request is sent again |
| any other error | the error is raised |

The first two are given up, and raised, if no token arrived for `OVERLOAD_PATIENCE_S` or `patience_s` seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import grpc

from roster_client.client.async_client import RosterClient
from roster_client.client.errors import (
    OverloadedError,
    RequestCancelledError,
    RosterError,
    StreamGapError,
    UnavailableError,
)
from roster_client.client.events import Completion, FinishReason
from roster_client.offline.answer_session import AnswerSession
from roster_client.offline.window import Window
from roster_protos import inference_pb2 as pb

MOST_IN_FLIGHT = 4096
"""Half of what a scheduler lets wait by default (`max_waiting_requests`), so that others still find room."""
PATIENCE_S = 60.0
"""As long as the scheduler waits for a runner by default (`no_runner_s`); a restart takes less."""
OVERLOAD_PATIENCE_S = 600.0
"""Ten times that: a server that refuses is alive, and other clients' queues may take minutes to serve."""
RECONNECT_PAUSE_S = 0.25
"""Short beside a restart, long beside an attempt that is refused at once."""


class BulkClient:
    """Answers requests over one session, used in an `async with`; `ask` may be awaited by any number of tasks."""

    def __init__(self, client: RosterClient, *, most: int = MOST_IN_FLIGHT, patience_s: float = PATIENCE_S) -> None:
        """`most`: maximum number of requests in flight. `patience_s`: how long to wait for a server that is gone."""
        self._client = client
        self._window = Window(most)
        self._patience_s = patience_s
        self._session: AnswerSession | None = None
        self._opening = asyncio.Lock()
        self._former_tokens = 0
        self._failing_since: float | None = None

    @property
    def tokens_received(self) -> int:
        """Number of tokens received so far, those of unfinished answers included."""
        return self._former_tokens + (self._session.tokens_received if self._session is not None else 0)

    async def ask(self, request: pb.GenerateRequest) -> Completion:
        """Returns the whole answer to a request. Raises RosterError."""
        began_at = time.monotonic()
        while True:
            await self._window.enter()
            try:
                session = await self._open_session()
                completion = await session.ask(request)
                _check_available(completion)
                self._window.answered()
                return completion
            except OverloadedError as error:
                self._give_up(error, request, began_at, OVERLOAD_PATIENCE_S)
                self._window.refused(error.retry_after_s)
            except (UnavailableError, RequestCancelledError, StreamGapError) as error:
                self._give_up(error, request, began_at, self._patience_s)
                self._window.hold(RECONNECT_PAUSE_S)
            except RosterError:
                self._window.answered()
                raise
            finally:
                self._window.leave()

    async def ask_all(
        self, requests: Sequence[pb.GenerateRequest], on_answer: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """Returns the answers to requests, in their order. Calls `on_answer` when one has arrived.

        If one fails, cancels the others and raises its RosterError. Of several, the message says which.
        """

        async def ask(request: pb.GenerateRequest) -> Completion:
            completion = await self.ask(request)
            on_answer()
            return completion

        tasks = [asyncio.create_task(ask(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except RosterError as error:
            if len(tasks) > 1:  # those of a broken session have the same error
                failed = (task.done() and not task.cancelled() and task.exception() is error for task in tasks)
                error.message = f"prompt {list(failed).index(True)}: {error.message}"
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.__aexit__(kind, error, trace)

    def _give_up(self, error: RosterError, request: pb.GenerateRequest, began_at: float, patience_s: float) -> None:
        """Raises the error if it is time to."""
        now = time.monotonic()
        if request.HasField("timeout_ms") and now - began_at >= request.timeout_ms / 1000:
            raise error
        if self._failing_since is None or self._moved_at() > self._failing_since:
            self._failing_since = now
        if now - self._failing_since >= patience_s:
            raise error

    def _moved_at(self) -> float:
        return self._session.moved_at if self._session is not None else 0.0

    async def _open_session(self) -> AnswerSession:
        async with self._opening:
            if self._session is None or self._session.broken is not None:
                if self._session is not None:
                    self._former_tokens += self._session.tokens_received
                    await self._session.__aexit__(None, None, None)
                moved_at = self._moved_at()
                self._session = await AnswerSession(self._client.session_call).__aenter__()
                self._session.moved_at = moved_at
            return self._session


def _check_available(completion: Completion) -> None:
    """Raises UnavailableError if the server could not finish an answer."""
    for choice in completion.choices:
        if choice.finish is not None and choice.finish.reason is FinishReason.UNAVAILABLE:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, choice.finish.message or "the server shut down")
