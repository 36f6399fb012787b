"""gRPC health (grpc.health.v1): liveness is the service "", readiness is "roster.v1.InferenceService"."""

from __future__ import annotations

from grpc_health.v1 import health, health_pb2

INFERENCE_SERVICE = "roster.v1.InferenceService"
"""SERVING while a runner is there and the service does not drain."""

ADMIN_SERVICE = "roster.admin.v1.AdminService"

HEALTH_SERVICE = health.SERVICE_NAME

LIVENESS = ""
"""SERVING while the process answers."""


class WorkerHealth:
    """The health service of one worker."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()

    async def start(self) -> None:
        """Alive, not ready."""
        await self.servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """Says whether requests are taken and served now."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.servicer.set(INFERENCE_SERVICE, status)
