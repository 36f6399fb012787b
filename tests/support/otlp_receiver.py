"""A small OpenTelemetry collector: receives spans over OTLP gRPC and keeps them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans in order of arrival, and the attributes of the last sender."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[trace_pb2.Span] = []
        self.resource: dict[str, Any] = {}

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:
        """Called by exporters."""
        for sender in request.resource_spans:
            self.resource = attributes(sender.resource.attributes)
            for scope in sender.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, count: int, timeout_s: float = 60) -> list[trace_pb2.Span]:
        """Waits until there are `count` spans; returns all."""
        deadline = time.monotonic() + timeout_s
        while len(self.spans) < count:
            assert time.monotonic() < deadline, f"{len(self.spans)} of {count} spans arrived within {timeout_s} s"
            time.sleep(0.05)
        return self.spans


def attributes(pairs: Any) -> dict[str, Any]:
    """Returns attributes as Python values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Runs a collector on a free port."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
