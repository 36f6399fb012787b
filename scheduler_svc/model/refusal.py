"""A request or call that the engine refuses, with the status that its client gets."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from roster_protos import engine_pb2
from scheduler_svc.model.refusal_reason import RefusalReason


@dataclass(slots=True, frozen=True)
class EngineRefusal:
    """Why a request or call is refused, as a gRPC status; `retry_after_s` 0 means no RetryInfo."""

    code: grpc.StatusCode
    message: str
    field: str = ""
    retry_after_s: float = 0.0
    reason: RefusalReason | None = None
    """What it counts as; None for calls that are no new requests."""

    def to_message(self, handle: int) -> engine_pb2.FromEngine:
        """The answer to the worker."""
        return engine_pb2.FromEngine(
            refused=engine_pb2.Refused(
                handle=handle,
                code=self.code.value[0],
                message=self.message,
                field=self.field,
                retry_after_ms=int(self.retry_after_s * 1000),
            )
        )
