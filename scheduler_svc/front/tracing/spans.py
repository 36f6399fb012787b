"""Writes the spans of an ended request, according to OpenTelemetry's semantic conventions for generative AI.

They contain neither prompts nor answers.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from roster_common.distribution import distribution_version
from roster_protos import inference_pb2
from scheduler_svc.front.request.validation import ValidRequest
from scheduler_svc.front.tracing.request_trace import Metadata, RequestTrace

PROVIDER = "roster"
_KEYS = ("traceparent", "tracestate")
_FAILURES: dict[int, str] = {
    inference_pb2.FINISH_REASON_DEADLINE: "deadline",
    inference_pb2.FINISH_REASON_ERROR: "error",
    inference_pb2.FINISH_REASON_UNAVAILABLE: "unavailable",
}


class SpanWriter:
    """Writes spans to the exporters of one provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("roster", distribution_version())
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, metadata: Metadata | None) -> RequestTrace:
        """Begins a trace in the caller's context, or a root trace if the context is absent or malformed."""
        carrier = {key: value for key, value in metadata or () if key in _KEYS and isinstance(value, str)}
        return RequestTrace(self.write, self._propagator.extract(carrier))

    def write(self, trace: RequestTrace) -> None:
        """Writes all spans of the request."""
        parent = trace.parent if isinstance(trace.parent, Context) else None
        span = self._tracer.start_span(
            _name(trace), parent, SpanKind.SERVER, _attributes(trace), start_time=trace.begin_ns
        )
        if failure := _failure(trace):
            span.set_attribute("error.type", failure[0])
            span.set_status(Status(StatusCode.ERROR, failure[1]))
        inside = set_span_in_context(span, parent)
        for name, begin_ns, end_ns in phases(trace):
            self._tracer.start_span(name, inside, start_time=begin_ns).end(end_ns)
        span.end(trace.end_ns)


def phases(trace: RequestTrace) -> list[tuple[str, int, int]]:
    """Returns (name, begin, end) of the request's phases, in order and without gaps, in nanoseconds since 1970."""
    if trace.submitted_ns is None:
        return [("prepare", trace.begin_ns, trace.end_ns)]
    spans = [("prepare", trace.begin_ns, trace.submitted_ns)]
    first_ns = trace.end_ns if trace.first_token_ns is None else trace.first_token_ns
    if trace.queue_s is not None:
        seated_ns = min(first_ns, trace.submitted_ns + round(trace.queue_s * 1e9))
        spans += [("queue", trace.submitted_ns, seated_ns), ("prefill", seated_ns, first_ns)]
    elif trace.cut:  # the engine's End, which separates the two phases, was not awaited
        spans.append(("queue and prefill", trace.submitted_ns, first_ns))
    else:
        spans.append(("queue", trace.submitted_ns, first_ns))
    if trace.first_token_ns is not None:
        spans.append(("decode", first_ns, trace.end_ns))
    return spans


def _name(trace: RequestTrace) -> str:
    if trace.request is None:
        return "refused"
    return f"{_operation(trace.request)} {trace.model}"


def _operation(request: ValidRequest) -> str:
    kind = request.body.prompt.WhichOneof("kind")
    return "chat" if kind in ("chat", "user_message") else "text_completion"


def _attributes(trace: RequestTrace) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"gen_ai.provider.name": PROVIDER}
    request = trace.request
    if request is None:
        return attributes
    sampling = request.sampling
    attributes |= {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": trace.num_tokens,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if request.n != 1:
        attributes["gen_ai.request.choice.count"] = request.n
    if request.body.sampling.HasField("seed"):
        # Attributes are signed 64-bit numbers; seeds are unsigned.
        attributes["gen_ai.request.seed"] = request.body.sampling.seed & (2**63 - 1)
    if request.body.stop.strings:
        attributes["gen_ai.request.stop_sequences"] = list(request.body.stop.strings)
    if trace.ends:
        attributes["gen_ai.response.finish_reasons"] = [_reason(end.reason) for end in trace.ends]
        attributes["gen_ai.usage.cache_read.input_tokens"] = trace.ends[0].cached_tokens
        if drafted := sum(end.drafted_tokens for end in trace.ends):
            attributes["roster.usage.drafted_tokens"] = drafted
            attributes["roster.usage.accepted_tokens"] = sum(end.accepted_tokens for end in trace.ends)
    if trace.first_token_ns is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = (trace.first_token_ns - trace.begin_ns) / 1e9
    if trace.tenant:
        attributes["roster.tenant"] = trace.tenant
    if trace.cut:
        attributes["roster.disconnected"] = True
    return attributes


def _failure(trace: RequestTrace) -> tuple[str, str] | None:
    """Returns (error type, message) of a failed request, None otherwise."""
    if trace.refusal is not None:
        return trace.refusal.code.name, trace.refusal.message
    for end in trace.ends:
        if end.reason in _FAILURES:
            return _FAILURES[end.reason], end.message
    return None


def _reason(reason: int) -> str:
    return inference_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
