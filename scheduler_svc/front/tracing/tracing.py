"""Turns tracing on: where spans go, and how a request's begins. Needs the extra `tracing`.

Spans are exported in batches by a thread of the SDK; a collector that is away costs their loss, never a request.
The SDK's own variables hold as well: OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES and the like; the service's name is
"roster" whatever they say.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from roster_common.distribution import distribution_version
from scheduler_svc.front.tracing.request_trace import Metadata, RequestTrace
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 5.0
"""A batch that takes longer is lost."""
EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


class TracingUnavailable(ValueError):
    """`otlp_endpoint` is set and the packages are missing."""


def check_tracing(settings: SchedulerSettings) -> None:
    """Raises TracingUnavailable when tracing is on and can't be: at the start, not in each worker."""
    if settings.otlp_endpoint and not _installed():
        raise TracingUnavailable(
            "otlp_endpoint needs OpenTelemetry: install it with `pip install 'roster-serve[tracing]'`, or leave it out"
        )


class Tracing:
    """Begins the traces of one worker's requests."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """`provider`: where spans go; None: nowhere, nothing is traced."""
        self._provider = provider
        self._begin: Callable[[Metadata | None], RequestTrace] | None = None
        if provider is not None:
            from scheduler_svc.front.tracing.spans import SpanWriter

            self._begin = SpanWriter(provider).begin

    @classmethod
    def open(cls, settings: SchedulerSettings) -> Tracing:
        """As the settings say: to the collector at `otlp_endpoint`, or off. Call `check_tracing` first."""
        if not settings.otlp_endpoint:
            return cls()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "roster", "service.version": distribution_version()})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        insecure = not settings.otlp_endpoint.startswith("https:")
        exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(self, metadata: Metadata | None) -> RequestTrace | None:
        """A request has come, in the context that its call's metadata carry (W3C traceparent); None while off."""
        return None if self._begin is None else self._begin(metadata)

    def close(self) -> None:
        """Sends what is left. Blocks for up to `EXPORT_TIMEOUT_S`."""
        if self._provider is not None:
            self._provider.shutdown()


def _installed() -> bool:
    try:
        return find_spec(EXPORTER) is not None
    except ImportError:
        return False
