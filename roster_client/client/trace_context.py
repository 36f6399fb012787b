"""Propagates the caller's trace: OpenTelemetry's current context as W3C `traceparent` in a call's metadata."""

from __future__ import annotations

from collections.abc import Callable

Metadata = tuple[tuple[str, str], ...]


def metadata_source(metadata: Metadata, trace: bool) -> Callable[[], Metadata]:
    """Returns a function that returns a call's metadata: `metadata` and, if `trace` is set, the current trace context.

    Raises ValueError if `trace` is set and OpenTelemetry is not installed.
    """
    if not trace:
        return lambda: metadata
    try:
        from opentelemetry import propagate
    except ImportError as error:
        raise ValueError("trace=True requires OpenTelemetry: pip install opentelemetry-api") from error

    def with_trace() -> Metadata:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return metadata + tuple(carrier.items())

    return with_trace
