"""The standard gRPC health check (grpc.health.v1) of a server."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from roster_client.client.errors import NotFoundError, from_rpc_error

READINESS = "roster.v1.InferenceService"
"""Readiness: requests are accepted. "" is liveness; "roster.engine" and "roster.runner" detect hangs."""


def check_health(channel: grpc.Channel, timeout_s: float, service: str = READINESS) -> str:
    """Returns the name of the service's status, "SERVING" if healthy. Raises RosterError if there is no answer."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise NotFoundError(error.code(), f"the server has no health service {service!r}") from None
        raise from_rpc_error(error) from None
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
