"""Sets up tracing: the exporter, and the start of each request's trace. Needs the extra `tracing`.

A thread of the SDK exports spans in batches. If the collector is unavailable, spans are lost, but requests are not
affected. The SDK's variables apply (OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES and so on), except that the service
name is always "roster".
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from roster_common.distribution import distribution_version
from roster_common.endpoints import proxy_options
from scheduler_svc.front.tracing.request_trace import Metadata, RequestTrace
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 5.0
"""Seconds after which the export of a batch is abandoned."""
EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


class TracingUnavailable(ValueError):
    """`otlp_endpoint` is set, but the packages are missing."""


def check_tracing(settings: SchedulerSettings) -> None:
    """Raises TracingUnavailable if tracing is on but its packages are missing, ValueError for a wrong address.

    The scheduler calls this function at startup, so that the error is raised there and not in each worker.
    """
    try:
        _channel_options(settings)
    except ValueError as error:
        raise ValueError(f"setting otlp_endpoint: {error}") from error
    if settings.otlp_endpoint and not _installed():
        raise TracingUnavailable(
            "otlp_endpoint requires OpenTelemetry: install it with `pip install 'roster-serve[tracing]'`, or remove "
            "otlp_endpoint"
        )


class Tracing:
    """Begins the traces of one worker's requests."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """`provider`: receives the spans; None turns tracing off."""
        self._provider = provider
        self._begin: Callable[[Metadata | None], RequestTrace] | None = None
        if provider is not None:
            from scheduler_svc.front.tracing.spans import SpanWriter

            self._begin = SpanWriter(provider).begin

    @classmethod
    def open(cls, settings: SchedulerSettings) -> Tracing:
        """Returns tracing to the collector at `otlp_endpoint`, or turned off. Call `check_tracing` first."""
        if not settings.otlp_endpoint:
            return cls()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "roster", "service.version": distribution_version()})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        insecure = not settings.otlp_endpoint.startswith("https:")
        exporter = OTLPSpanExporter(
            endpoint=settings.otlp_endpoint,
            insecure=insecure,
            timeout=EXPORT_TIMEOUT_S,
            channel_options=_channel_options(settings) or None,  # type: ignore[arg-type]
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(self, metadata: Metadata | None) -> RequestTrace | None:
        """Begins the trace of a request in the context of its metadata (W3C traceparent). Returns None if off."""
        return None if self._begin is None else self._begin(metadata)

    def close(self) -> None:
        """Exports the remaining spans. Blocks for up to `EXPORT_TIMEOUT_S`."""
        if self._provider is not None:
            self._provider.shutdown()


def _channel_options(settings: SchedulerSettings) -> tuple[tuple[str, int], ...]:
    return tuple(proxy_options(urlsplit(settings.otlp_endpoint).netloc))


def _installed() -> bool:
    try:
        return find_spec(EXPORTER) is not None
    except ImportError:
        return False
