"""A request that is turned away: a gRPC code, a sentence that says what to change, and google.rpc details.

The details are BadRequest (the field at fault, as a path in the public message) and RetryInfo (when to come back). The
same refusal becomes a gRPC status with `grpc-status-details-bin` in the trailing metadata, or a `roster.v1.Status`
inside a session.
"""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from roster_protos import engine_pb2, inference_pb2

STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
"""gRPC status codes by their number on the wire."""

DETAILS_KEY = "grpc-status-details-bin"
"""Metadata key of a serialized google.rpc.Status (gRPC's richer error model)."""


class Refusal(Exception):
    """Why a request isn't served.

    `code` is what gRPC answers, `message` a sentence for the caller, `field` the path of the field at fault in the
    public message ("sampling.temperature"; "" for none), `retry_after_ms` when to come back, in milliseconds (0: no
    advice).
    """

    def __init__(self, code: grpc.StatusCode, message: str, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    @classmethod
    def from_engine(cls, refused: engine_pb2.Refused) -> Refusal:
        """The engine's refusal; a code that gRPC doesn't know (or OK, which refuses nothing) becomes UNKNOWN."""
        code = STATUS_CODES.get(refused.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            code = grpc.StatusCode.UNKNOWN
        return cls(code, refused.message, refused.field, refused.retry_after_ms)

    def status(self) -> status_pb2.Status:
        """The google.rpc.Status with its details."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_after_ms:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(self.retry_after_ms)
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return status

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """What `context.abort(code, message, trailing_metadata)` sends along so that clients see the details."""
        return ((DETAILS_KEY, self.status().SerializeToString()),)

    def session_status(self) -> inference_pb2.Status:
        """The refusal as an event of a session."""
        return inference_pb2.Status(
            code=self.code.value[0], message=self.message, details=self.status().SerializeToString()
        )


def invalid(field: str, message: str) -> Refusal:
    """INVALID_ARGUMENT at a field; the message starts with the field's path, for readers of the plain status."""
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}" if field else message, field)


def unimplemented(field: str, message: str) -> Refusal:
    """UNIMPLEMENTED at a field, or as a whole."""
    return Refusal(grpc.StatusCode.UNIMPLEMENTED, f"{field}: {message}" if field else message, field)


async def abort(context: grpc.aio.ServicerContext, refusal: Refusal) -> NoReturn:
    """Never returns: gRPC's abort raises."""
    await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())
    raise RuntimeError("abort returned")
