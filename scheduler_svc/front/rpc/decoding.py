"""Refuses undecodable messages with INVALID_ARGUMENT; gRPC itself answers UNKNOWN and logs a traceback."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from scheduler_svc.front.base.refusal import Refusal, abort, invalid

Deserializer = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Placeholder for a request that can't be decoded."""

    problem: str

    def refusal(self) -> Refusal:
        """Returns the refusal for the sender."""
        return invalid("", f"the request can't be decoded as this RPC's protobuf message: {self.problem}")


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Refuses undecodable requests of unary-request calls. A request stream yields `Undecodable` in their place."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the call's handler with a deserializer that returns `Undecodable` instead of raising."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None or _is_foreign(handler_call_details.method):
            return handler
        patient = {"request_deserializer": _patient(handler.request_deserializer)}
        for kind in ("unary_unary", "unary_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                patient[kind] = _guarded(behavior)
        return handler._replace(**patient)


def _is_foreign(method: str) -> bool:
    """Returns whether the method is reflection's, which reads its stream itself and does not handle `Undecodable`."""
    return method.startswith("/grpc.reflection.")


def _patient(deserializer: Deserializer) -> Deserializer:
    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError as error:
            return Undecodable(str(error))

    return deserialize


def _guarded(behavior: Any) -> Any:
    async def behave(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if isinstance(request, Undecodable):
            await abort(context, request.refusal())
        return await behavior(request, context)

    return behave
