"""Server reflection, under the names of both versions of its protocol, whose messages are the same on the wire.

grpcio-reflection serves v1alpha only; newer tools ask for v1 first, and some for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds reflection of these services, and of itself, to the server."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*services, V1ALPHA, V1))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in (V1ALPHA, V1)]
    server.add_generic_rpc_handlers(tuple(handlers))


def _describe_v1() -> None:
    """Adds v1's own descriptor, a copy of v1alpha's, to the pool, for tools that describe all services."""
    pool = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        text = text_format.MessageToString(file).replace("v1alpha", "v1")
        pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
