"""Resumes a broken stream: chooses the next call after an error, from the tokens received so far.

| error | response |
|---|---|
| UNAVAILABLE after the stream began, or CANCELLED, but not by the caller | Attach, with exponential backoff |
| NOT_FOUND from that Attach: the server no longer has the request | the request again, with `received_token_ids` |
| the same, with n > 1 | the request again from its beginning, then Attach as soon as it is accepted |
| ALREADY_EXISTS from that: the server has the request after all | Attach |
| the deadline of the call passed after the stream began | the stream ends, each open choice with reason DEADLINE |
| any other, or no success for `patience_s` | the error is raised |

A request's id and seed are fixed before it is first sent, so that a repeated request samples the same tokens. A stream
that never began is not resumed: the caller knows that it received nothing. This module never waits; both the asyncio
and the blocking client use it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from roster_client.client.errors import (
    AlreadyExistsError,
    DeadlineError,
    NotFoundError,
    RequestCancelledError,
    RosterError,
    UnavailableError,
)
from roster_client.client.events import Assembler, Event
from roster_protos import inference_pb2 as pb

RECONNECT_S = 30.0
"""Default time for which a broken stream tries to resume, in seconds."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.25


class NextCall(Enum):
    """The call that reopens the stream."""

    ATTACH = "attach"
    GENERATE = "generate"


@dataclass(frozen=True, slots=True)
class Retry:
    """The next call, after a pause in seconds."""

    call: NextCall
    pause_s: float


def is_broken(error: RosterError) -> bool:
    """Returns whether the connection failed. A server that shuts down cancels calls that do not end in time."""
    return isinstance(error, UnavailableError | RequestCancelledError)


def repeatable(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Returns the request with an id and a seed, so that it can be attached to and repeated token by token.

    The seed is derived from the id, so that repeating a call sends the same body, which attaches.
    """
    fixed = pb.GenerateRequest()
    fixed.CopyFrom(request)
    fixed.request_id = request.request_id or secrets.token_hex(16)
    greedy = request.sampling.HasField("temperature") and request.sampling.temperature == 0
    if not greedy and not request.sampling.HasField("seed"):
        fixed.sampling.seed = int.from_bytes(hashlib.blake2b(fixed.request_id.encode(), digest_size=8).digest())
    return fixed


class Resumption:
    """State of one stream across its connections."""

    def __init__(
        self,
        assembler: Assembler,
        request: pb.GenerateRequest | None,
        *,
        deadline_s: float | None = None,
        patience_s: float,
    ) -> None:
        """`request`: as first sent, from `repeatable`; None if the stream began with Attach.

        `deadline_s`: seconds from now for all connections together. `patience_s`: seconds without success after which
        errors are raised.
        """
        self._assembler = assembler
        self._request = request
        self._begin_s = time.monotonic()
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._pause_s = FIRST_PAUSE_S
        self._broken_s: float | None = None
        self._call: NextCall | None = None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, at least 0; None if there is no deadline."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._begin_s + self._deadline_s - time.monotonic())

    @property
    def attach_when_accepted(self) -> bool:
        """Whether the request was sent again from its beginning, so that its first message is followed by Attach."""
        return self._call is NextCall.GENERATE and self._from_scratch

    @property
    def _from_scratch(self) -> bool:
        return self._request is not None and self._request.n > 1

    def progress(self) -> None:
        """Notes that a message arrived, which resets the backoff and the patience."""
        self._pause_s, self._broken_s = FIRST_PAUSE_S, None

    def after(self, error: RosterError) -> Retry:
        """Returns the call to make after the error, or raises the error if the stream can't be resumed."""
        now_s = time.monotonic()
        if self._broken_s is None:
            self._broken_s = now_s
        call = self._call_after(error)
        if call is None or now_s - self._broken_s >= self._patience_s or self.remaining_s == 0:
            raise error
        self._call = call
        if not is_broken(error):
            return Retry(call, 0.0)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return Retry(call, pause_s)

    def cut_by_deadline(self, error: RosterError) -> Iterator[Event] | None:
        """Returns the events that end the stream if the error means that its deadline passed, otherwise None.

        A stream that never began has no answer, and the error is raised.
        """
        if self._deadline_s is None or self._assembler.completion.started is None:
            return None
        if not isinstance(error, DeadlineError) and self.remaining_s != 0:
            return None
        return self._assembler.cut_by_deadline(1 if self._request is None else max(1, self._request.n))

    def _call_after(self, error: RosterError) -> NextCall | None:
        if self._assembler.completion.started is None:
            return None
        if is_broken(error) or (isinstance(error, AlreadyExistsError) and self._call is NextCall.GENERATE):
            return NextCall.ATTACH
        if isinstance(error, NotFoundError) and self._call is NextCall.ATTACH and self._request is not None:
            return NextCall.GENERATE
        return None

    def accepted(self) -> Retry:
        """Notes that the server accepted the request sent again from its beginning; returns the Attach to make."""
        self._call = NextCall.ATTACH
        return Retry(NextCall.ATTACH, 0.0)

    def attach_request(self) -> pb.AttachRequest:
        """Returns the Attach for the rest of the stream."""
        return pb.AttachRequest(request_id=self._assembler.completion.request_id, received=self._assembler.received)

    def generate_request(self) -> pb.GenerateRequest:
        """Returns the request again: after the received tokens, or from its beginning if it has several choices."""
        again = pb.GenerateRequest()
        if self._request is None:
            raise ValueError("a stream that began with Attach has no request to send again")
        again.CopyFrom(self._request)
        if not self._from_scratch and self._assembler.completion.choices:
            again.received_token_ids.extend(self._assembler.completion.choices[0].token_ids)
        if again.HasField("timeout_ms"):
            elapsed_ms = int((time.monotonic() - self._begin_s) * 1000)
            again.timeout_ms = max(1, again.timeout_ms - elapsed_ms)
        return again


class Caller:
    """Makes the calls that open and reopen a stream, on an asyncio or blocking stub."""

    def __init__(self, stub: Any, metadata: Callable[[], Any]) -> None:
        """`metadata` is called before each call."""
        self._stub = stub
        self._metadata = metadata

    def generate(self, request: pb.GenerateRequest, timeout_s: float | None) -> Any:
        """Opens the stream of a new request."""
        return self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata())

    def attach(self, request: pb.AttachRequest, timeout_s: float | None) -> Any:
        """Opens the rest of a request's stream."""
        return self._stub.Attach(request, timeout=timeout_s, metadata=self._metadata())

    def reopen(self, call: NextCall, resumption: Resumption) -> Any:
        """Reopens a broken stream by `call`."""
        if call is NextCall.ATTACH:
            return self.attach(resumption.attach_request(), resumption.remaining_s)
        return self.generate(resumption.generate_request(), resumption.remaining_s)


def response_of(message: pb.GenerateResponse | pb.AttachResponse) -> pb.GenerateResponse:
    """Returns the response of a message of either call."""
    return message.response if isinstance(message, pb.AttachResponse) else message
