"""gRPC health (grpc.health.v1): liveness, readiness and hangs, each a service name of its own; Check and Watch.

| service                     | SERVING while                                                          | if not      |
|-----------------------------|------------------------------------------------------------------------|-------------|
| ""                          | this front process answers                                             | restart it  |
| "roster.v1.InferenceService"| requests are taken: a runner is there, no drain, and the engine turns  | send none   |
| "roster.engine"             | the engine has taken a turn within `stall_s`                           | restart it  |
| "roster.runner"             | some runner is there and has held no plan for longer than `stall_s`    | restart that|

Load changes none of them: a full queue refuses, and is healthy.
"""

from __future__ import annotations

from grpc_health.v1 import health, health_pb2

INFERENCE_SERVICE = "roster.v1.InferenceService"
ADMIN_SERVICE = "roster.admin.v1.AdminService"
HEALTH_SERVICE = health.SERVICE_NAME

LIVENESS = ""
READINESS = INFERENCE_SERVICE
ENGINE = "roster.engine"
RUNNER = "roster.runner"


class WorkerHealth:
    """The health service of one worker."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self._told: dict[str, bool] = {}

    async def start(self) -> None:
        """Alive; the engine is taken to turn until it misses its answers; nothing else is known yet."""
        await self.tell({LIVENESS: True, READINESS: False, ENGINE: True, RUNNER: False})

    async def tell(self, states: dict[str, bool]) -> None:
        """Says of each service whether it is SERVING; who watches one hears of changes only."""
        for service, serving in states.items():
            if self._told.get(service) is not serving:
                self._told[service] = serving
                status = health_pb2.HealthCheckResponse
                await self.servicer.set(service, status.SERVING if serving else status.NOT_SERVING)
