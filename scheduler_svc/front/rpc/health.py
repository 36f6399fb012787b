"""gRPC health checks (grpc.health.v1): liveness, readiness and stalls, each under its own service name.

| service                     | SERVING while                                                     | otherwise          |
|-----------------------------|-------------------------------------------------------------------|--------------------|
| ""                          | this front process answers                                        | restart it         |
| "roster.v1.InferenceService"| requests are accepted and computed: no drain, and both of the     | send no requests   |
|                             | following are SERVING                                             |                    |
| "roster.engine"             | the engine has completed a turn within `stall_s`                  | restart the engine |
| "roster.runner"             | at least one runner is connected, is not held back, and has had  | restart the runner |
|                             | no plan pending for longer than `stall_s`                         |                    |

Load affects none of them: a server whose queue is full refuses requests and is healthy. (The servicer of
grpcio-health-checking is not used: in its asyncio form, a watcher that leaves stops the updates of the other watchers
of its service, and a watcher that does not read blocks all of them.)
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
    """The health service of one worker. The worker and the engine are SERVING from the start."""

    def __init__(self) -> None:
        self._serving = {LIVENESS: True, READINESS: False, ENGINE: True, RUNNER: False}
        self._watchers: set[asyncio.Event] = set()

    def tell(self, states: Mapping[str, bool]) -> None:
        """Sets whether each of these services is SERVING, and notifies watchers of changes."""
        before = dict(self._serving)
        self._serving.update(states)
        if self._serving != before:
            for changed in self._watchers:
                changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Returns the current state of a service; NOT_FOUND for a service that is not in the table."""
        if request.service not in self._serving:
            known = ", ".join(repr(name) for name in self._serving)
            await abort(context, Refusal(grpc.StatusCode.NOT_FOUND, f"unknown service; use one of {known}"))
        return self._answer(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams the state of a service, now and after each change. A slow reader misses intermediate states."""
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
