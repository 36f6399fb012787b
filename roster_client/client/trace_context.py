"""Hands the caller's trace on: W3C `traceparent` in a call's metadata, from OpenTelemetry's current context."""

from __future__ import annotations

from collections.abc import Callable

Metadata = tuple[tuple[str, str], ...]


def metadata_source(metadata: Metadata, trace: bool) -> Callable[[], Metadata]:
    """What gives each call its metadata: `metadata`, and the trace that is current then if `trace` is set.

    Raises ValueError if it is set and OpenTelemetry is not installed.
    """
    if not trace:
        return lambda: metadata
    try:
        from opentelemetry import propagate
    except ImportError as error:
        raise ValueError("trace=True needs OpenTelemetry: pip install opentelemetry-api") from error

    def with_trace() -> Metadata:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return metadata + tuple(carrier.items())

    return with_trace
