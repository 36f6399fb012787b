"""A request or call that the engine refuses, with the status that its client gets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import grpc

from roster_protos import engine_pb2
from scheduler_svc.model.promise import Promise


@dataclass(slots=True, frozen=True)
class EngineRefusal:
    """Why a request or call is refused, as a gRPC status; `retry_after_s` 0 means no RetryInfo."""

    code: grpc.StatusCode
    message: str
    field: str = ""
    retry_after_s: float = 0.0
    reason: RefusalReason | None = None
    """What it counts as; None for calls that are no new requests."""
    promise: Promise | None = None
    """What holds for the same request from then on."""

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


class RefusalReason(Enum):
    """The values are those of the label `reason`."""

    ID_IN_USE = "id_in_use"
    DRAINING = "draining"
    NO_RUNNER = "no_runner"
    TOO_LONG = "too_long"
    """No runner that is there can ever hold it."""
    TENANT_LIMIT = "tenant_limit"
    DEADLINE = "deadline"
    """It would end too late at the present load."""
    POLICY = "policy"
    QUEUE_FULL = "queue_full"
    SHED = "shed"
    """It waited, and was taken back for a request of a tenant that has less of a full queue."""
    CONSTRAINT = "constraint"
    """Its constraint can't be used."""
    CRASHES_RUNNERS = "crashes_runners"
