"""The standard gRPC health check (grpc.health.v1) of a server."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .errors import from_rpc_error

SERVICE = "roster.v1.InferenceService"
"""Its health is readiness; that of the service "" only says that the process lives."""


def check_health(channel: grpc.Channel, timeout_s: float) -> str:
    """The name of the server's status, "SERVING" if it takes requests. Raises RosterError if it does not answer."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
