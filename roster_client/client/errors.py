"""Exceptions of the client: one subclass of `RosterError` for each gRPC status that a caller may want to handle.

The server explains refusals with google.rpc details (the field, the time to retry). They are parsed here, so that a
caller need not read gRPC metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

STATUS_DETAILS_KEY = "grpc-status-details-bin"

_WRITE_FAILED = (grpc.StatusCode.INTERNAL, "Internal error from Core")
"""grpc.aio's error for a message that could not be written because the connection broke; not from the server."""

_SHUT_DOWN = (grpc.StatusCode.CANCELLED, "CANCELLED")
"""gRPC's words for a call that a server cut off as it shut down. A caller's own cancellation has others."""

_DEADLINE_PASSED = "the call's deadline passed before the server had answered"

_OTHER_PROTOCOLS = {
    "Failed parsing HTTP/2": "what listens at this address does not speak gRPC",
    "WRONG_VERSION_NUMBER": "what listens at this address does not use TLS",
}
"""Part of gRPC's words where another protocol's server is at the address, and ours."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that the server refused: its path in the public message, and what to change."""

    field: str
    description: str


class RosterError(Exception):
    """A failed call: its status `code`, `message`, invalid fields, and the time to retry.

    `retry_after_s` is in seconds; None if the server gave no time.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        fields = [f"{v.field}: {v.description}" for v in self.violations if v.description not in self.message]
        text = "; ".join([self.message, *fields]) if self.message else "; ".join(fields)
        text = text or f"the call failed with {self.code.name}"
        if self.retry_after_s is None:
            return text
        return f"{text.removesuffix('; try again')} (try again in {self.retry_after_s:g} s)"


class InvalidRequestError(RosterError):
    """INVALID_ARGUMENT or OUT_OF_RANGE: the request is invalid; `violations` say what to change."""


class NotFoundError(RosterError):
    """NOT_FOUND: the tenant has no such request, or its retention time is over."""


class AlreadyExistsError(RosterError):
    """ALREADY_EXISTS: the request id is in use with another body."""


class OverloadedError(RosterError):
    """RESOURCE_EXHAUSTED: the queue is full; retry after `retry_after_s`."""


class DeadlineError(RosterError):
    """DEADLINE_EXCEEDED: the call's deadline passed."""


class RequestCancelledError(RosterError):
    """CANCELLED: the call was cancelled."""


class UnavailableError(RosterError):
    """UNAVAILABLE: no server answers at the address, or it has no runner."""


class NotSupportedError(RosterError):
    """UNIMPLEMENTED: the server does not support the request."""


class StreamGapError(RosterError):
    """A delta did not continue the previous one: tokens were lost or repeated."""

    def __init__(self, index: int, expected: int, got: int) -> None:
        message = f"choice {index}: the next delta starts at token {got}, expected {expected}"
        super().__init__(grpc.StatusCode.DATA_LOSS, message)


_CLASSES: dict[grpc.StatusCode, type[RosterError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: NotSupportedError,
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def from_rpc_error(error: grpc.RpcError) -> RosterError:
    """Returns the exception for a failed call, blocking or asyncio, with the details of its trailing metadata."""
    call: Any = error
    if (call.code(), call.details()) == _WRITE_FAILED:
        return UnavailableError(grpc.StatusCode.UNAVAILABLE, "the connection broke while a message was written")
    if (call.code(), call.details()) == _SHUT_DOWN:
        return UnavailableError(grpc.StatusCode.UNAVAILABLE, "the server shut down during the call; try again")
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "deadline exceeded" in (call.details() or "").lower():
        return DeadlineError(grpc.StatusCode.DEADLINE_EXCEEDED, _DEADLINE_PASSED)  # gRPC's own words, not the server's
    if call.code() is grpc.StatusCode.UNAVAILABLE:
        for words, sentence in _OTHER_PROTOCOLS.items():
            if words in (call.details() or ""):
                return UnavailableError(grpc.StatusCode.UNAVAILABLE, sentence)
    details = status_pb2.Status()
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            try:
                details = status_pb2.Status.FromString(value)
            except DecodeError:
                details = status_pb2.Status()
    return _build(call.code(), call.details() or details.message, details)


def from_status(code: int, message: str, details: bytes) -> RosterError:
    """Returns the exception for a refusal within a session, from `roster.v1.Status`; `details`: a google.rpc.Status."""
    try:
        status = status_pb2.Status.FromString(details)
    except DecodeError:
        status = status_pb2.Status()
    return _build(_CODES.get(code, grpc.StatusCode.UNKNOWN), message or status.message, status)


def _build(code: grpc.StatusCode, message: str, status: status_pb2.Status) -> RosterError:
    violations: list[FieldViolation] = []
    retry_after_s: float | None = None
    bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details if status.code != code_pb2.OK else ():
        if detail.Unpack(bad_request):
            violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(retry_info):
            retry_after_s = retry_info.retry_delay.seconds + retry_info.retry_delay.nanos / 1e9
    return _CLASSES.get(code, RosterError)(code, message, tuple(violations), retry_after_s)
