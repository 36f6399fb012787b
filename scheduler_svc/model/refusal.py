"""Refusal of a request or call by the engine, with the status for its client."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import grpc

from roster_protos import engine_pb2
from scheduler_svc.model.promise import Promise


@dataclass(slots=True, frozen=True)
class EngineRefusal:
    """A refusal as a gRPC status; `retry_after_s` 0 means no RetryInfo."""

    code: grpc.StatusCode
    message: str
    field: str = ""
    retry_after_s: float = 0.0
    reason: RefusalReason | None = None
    """The reason it is counted under; None for calls other than new requests."""
    promise: Promise | None = None
    """The retry promise given with the refusal."""

    def to_message(self, handle: int) -> engine_pb2.FromEngine:
        """Returns the message for the worker."""
        return engine_pb2.FromEngine(
            refused=engine_pb2.Refused(
                handle=handle,
                code=self.code.value[0],
                message=self.message,
                field=self.field,
                retry_after_ms=int(self.retry_after_s * 1000),
            )
        )


class RefusalReason(Enum):
    """The reason for a refusal. The values are those of the metric label `reason`."""

    ID_IN_USE = "id_in_use"
    DRAINING = "draining"
    NO_RUNNER = "no_runner"
    TOO_LONG = "too_long"
    """No connected runner can ever hold it."""
    TENANT_LIMIT = "tenant_limit"
    DEADLINE = "deadline"
    """It would miss its deadline at the present load."""
    POLICY = "policy"
    QUEUE_FULL = "queue_full"
    SHED = "shed"
    """It was removed from a full queue for a request of a tenant with a smaller share."""
    CONSTRAINT = "constraint"
    """Its constraint is unusable."""
    CRASHES_RUNNERS = "crashes_runners"
