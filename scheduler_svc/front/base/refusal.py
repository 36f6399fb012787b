"""Refusal of a request: a gRPC code, a sentence that says what to change, and google.rpc details.

The details are BadRequest (the invalid field, as a path in the public message) and RetryInfo (when to retry). A refusal
becomes a gRPC status with `grpc-status-details-bin` in the trailing metadata, or a `roster.v1.Status` in a session.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from roster_protos import engine_pb2, inference_pb2

STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
"""gRPC status codes by their number on the wire."""

DETAILS_KEY = "grpc-status-details-bin"
"""Metadata key of a serialized google.rpc.Status (gRPC's richer error model)."""


class Refusal(Exception):
    """The reason why a request isn't served.

    `code` is the gRPC status code and `message` a sentence for the caller. `field` is the path of the invalid field in
    the public message ("sampling.temperature"; "" for none). `retry_after_ms` is the delay before a retry in
    milliseconds (0: no advice).
    """

    def __init__(self, code: grpc.StatusCode, message: str, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    @classmethod
    def from_engine(cls, refused: engine_pb2.Refused) -> Refusal:
        """Returns the engine's refusal. A code that gRPC doesn't know, and OK, become UNKNOWN."""
        code = STATUS_CODES.get(refused.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            code = grpc.StatusCode.UNKNOWN
        return cls(code, refused.message, refused.field, refused.retry_after_ms)

    def status(self) -> status_pb2.Status:
        """Returns the google.rpc.Status with its details."""
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
        """Returns the metadata for `context.abort(code, message, trailing_metadata)` that carry the details."""
        return ((DETAILS_KEY, self.status().SerializeToString()),)

    def session_status(self) -> inference_pb2.Status:
        """Returns the refusal as an event of a session."""
        return inference_pb2.Status(
            code=self.code.value[0], message=self.message, details=self.status().SerializeToString()
        )


def invalid(field: str, message: str) -> Refusal:
    """Returns INVALID_ARGUMENT for a field. The message starts with its path, for readers of the plain status."""
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}" if field else message, field)


def unimplemented(field: str, message: str) -> Refusal:
    """Returns UNIMPLEMENTED for a field, or for the whole request if `field` is ""."""
    return Refusal(grpc.StatusCode.UNIMPLEMENTED, f"{field}: {message}" if field else message, field)


async def abort(context: grpc.aio.ServicerContext, refusal: Refusal) -> NoReturn:
    """Ends the call with the refusal's status. Never returns: gRPC's abort raises."""
    await context.abort(refusal.code, refusal.message, refusal.trailing_metadata())
    raise RuntimeError("abort returned")


def refusing(refusal: Refusal) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns a handler for calls of any kind: as it streams both ways, it does not wait for a message."""

    async def refuse(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> NoReturn:
        await abort(context, refusal)

    return grpc.stream_stream_rpc_method_handler(refuse)
