"""gRPC health (grpc.health.v1): liveness, readiness and hangs, each a service name of its own; Check and Watch.

| service                     | SERVING while                                                          | if not      |
|-----------------------------|------------------------------------------------------------------------|-------------|
| ""                          | this front process answers                                             | restart it  |
| "roster.v1.InferenceService"| requests are taken and computed: no drain, and both of the following   | send none   |
| "roster.engine"             | the engine has taken a turn within `stall_s`                           | restart it  |
| "roster.runner"             | some runner is there, is not held back, and has held no plan for       | restart that|
|                             | longer than `stall_s`                                                  |             |

Load changes none of them: a full queue refuses, and is healthy. (The servicer of grpcio-health-checking is not used: in
its asyncio form a watcher that leaves silences the others of its service, and one that does not read holds up all.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from scheduler_svc.front.base.refusal import Refusal, abort

INFERENCE_SERVICE = "roster.v1.InferenceService"
ADMIN_SERVICE = "roster.admin.v1.AdminService"
HEALTH_SERVICE = health.SERVICE_NAME

LIVENESS = ""
READINESS = INFERENCE_SERVICE
ENGINE = "roster.engine"
RUNNER = "roster.runner"


class WorkerHealth(health_pb2_grpc.HealthServicer):
    """The health service of one worker: alive from the start; the engine turns until it misses its answers."""

    def __init__(self) -> None:
        self._serving = {LIVENESS: True, READINESS: False, ENGINE: True, RUNNER: False}
        self._watchers: set[asyncio.Event] = set()

    def tell(self, states: Mapping[str, bool]) -> None:
        """Says of each service whether it is SERVING."""
        before = dict(self._serving)
        self._serving.update(states)
        if self._serving != before:
            for changed in self._watchers:
                changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state of a service now; NOT_FOUND for one that is not in the table."""
        if request.service not in self._serving:
            known = ", ".join(repr(name) for name in self._serving)
            await abort(context, Refusal(grpc.StatusCode.NOT_FOUND, f"there is no such service; ask for {known}"))
        return self._answer(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """The state of a service now and whenever it has changed; a slow reader misses what came between."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            last: health_pb2.HealthCheckResponse | None = None
            while True:
                changed.clear()
                answer = self._answer(request.service)
                if answer != last:
                    await context.write(answer)
                    last = answer
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        serving = self._serving.get(service)
        if serving is None:
            return health_pb2.HealthCheckResponse(status=status.SERVICE_UNKNOWN)
        return health_pb2.HealthCheckResponse(status=status.SERVING if serving else status.NOT_SERVING)
