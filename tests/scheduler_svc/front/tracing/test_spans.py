"""Spans of artificial requests in an in-memory exporter: times, parents, names and attributes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from roster_protos import engine_pb2, inference_pb2, plan_pb2
from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.request.validation import ValidRequest
from scheduler_svc.front.tracing.request_trace import RequestTrace
from scheduler_svc.front.tracing.tracing import Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def valid(n: int = 1) -> ValidRequest:
    body = inference_pb2.GenerateRequest()
    body.prompt.chat.messages.add(role="user")
    body.stop.strings.append("END")
    body.sampling.seed = (1 << 64) - 1
    sampling = plan_pb2.Sampling(temperature=0.5, top_p=0.9, top_k=40)
    return ValidRequest(body, "my-id", [1, 2, 3], [], sampling, n, 50, None, 0)


def begun(tracing: Tracing, *metadata: tuple[str, str]) -> RequestTrace:
    trace = tracing.begin(metadata)
    assert trace is not None
    trace.begin_ns = 1_000_000_000
    return trace


def lived(trace: RequestTrace, *ends: tuple[engine_pb2.End, int], queue_s: float = 2.0) -> None:
    """Completes a trace with 1 s of preparation, `queue_s` of queueing, and the first token 5 s after arrival."""
    trace.submitted(valid(len(ends)), "acme", "smollm2")
    trace.submitted_ns = 2_000_000_000
    trace.first_token_ns = 6_000_000_000
    for end, num_tokens in ends:
        end.queue_s = queue_s
        trace.choice_ended(end, num_tokens)
    trace.finish()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_request_in_its_callers_trace(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    trace = begun(tracing, ("traceparent", PARENT), ("other", "x"))
    lived(trace, (engine_pb2.End(reason=STOP, cached_tokens=2, drafted_tokens=7, accepted_tokens=3), 17))
    spans = by_name(exporter)
    assert set(spans) == {"chat smollm2", "prepare", "queue", "prefill", "decode"}
    root = spans["chat smollm2"]
    assert root.kind is SpanKind.SERVER and root.status.status_code is StatusCode.UNSET
    assert root.parent is not None and f"{root.parent.span_id:x}" == "b7ad6b7169203331"
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {PARENT.split("-")[1]}
    for name in ("prepare", "queue", "prefill", "decode"):
        assert spans[name].parent is not None and spans[name].parent.span_id == root.context.span_id
    assert (seconds(spans["prepare"]), seconds(spans["queue"])) == ((1, 2), (2, 4))
    assert seconds(spans["prefill"]) == (4, 6) and seconds(spans["decode"])[0] == 6
    assert seconds(spans["decode"])[1] == seconds(root)[1] and seconds(root)[0] == 1
    assert dict(root.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "roster",
        "gen_ai.request.model": "smollm2",
        "gen_ai.response.model": "smollm2",
        "gen_ai.response.id": "my-id",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 5.0,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": pytest.approx(0.9),
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": (1 << 63) - 1,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 17,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "roster.usage.drafted_tokens": 7,
        "roster.usage.accepted_tokens": 3,
        "roster.tenant": "acme",
    }


def test_names_are_those_of_the_conventions(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    lived(begun(tracing), (engine_pb2.End(reason=STOP), 1), (engine_pb2.End(reason=LENGTH), 2))
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    root = by_name(exporter)["chat smollm2"]
    assert root.parent is None
    names = {name for name in root.attributes or {} if name.startswith("gen_ai.")}
    assert names <= known, names - known
    assert dict(root.attributes or {})["gen_ai.request.choice.count"] == 2
    assert dict(root.attributes or {})["gen_ai.usage.output_tokens"] == 3


def test_a_queue_that_seems_longer_than_the_way_to_the_first_token(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    lived(begun(tracing), (engine_pb2.End(reason=STOP), 1), queue_s=9.0)
    spans = by_name(exporter)
    assert seconds(spans["queue"]) == (2, 6) and seconds(spans["prefill"]) == (6, 6)


def test_one_that_ended_while_it_waited(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    trace = begun(tracing)
    trace.submitted(valid(), "", "m")
    trace.choice_ended(engine_pb2.End(reason=inference_pb2.FINISH_REASON_DEADLINE, message="too late"), 0)
    trace.finish()
    spans = by_name(exporter)
    assert set(spans) == {"chat m", "prepare", "queue"}
    assert spans["chat m"].status.status_code is StatusCode.ERROR
    assert spans["chat m"].status.description == "too late"
    assert dict(spans["chat m"].attributes or {})["error.type"] == "deadline"


def test_refusals_before_and_after_the_request_is_understood(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    refusal = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    begun(tracing).refused(refusal)
    trace = begun(tracing)
    trace.submitted(valid(), "", "m")
    trace.refused(refusal)
    trace.refused(refusal)  # the service reports it again
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["prepare", "refused", "prepare", "queue", "chat m"]
    for span in (spans[1], spans[4]):
        assert dict(span.attributes or {})["error.type"] == "RESOURCE_EXHAUSTED"
        assert span.status.description == "the queue is full"


def test_a_client_that_went(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    trace = begun(tracing, ("traceparent", "not one"))
    trace.submitted(valid(), "", "m")
    trace.token()
    trace.disconnected()
    trace.finish()
    spans = by_name(exporter)
    assert len(exporter.get_finished_spans()) == len(spans) and spans["chat m"].parent is None
    assert dict(spans["chat m"].attributes or {})["roster.disconnected"] is True
    assert set(spans) == {"chat m", "prepare", "queue and prefill", "decode"}


def test_off_there_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tracing().begin([("traceparent", PARENT)]) is None
    Tracing().close()


def test_unsampled_traces_are_not_written(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    parent: Any = PARENT[:-2] + "00"
    lived(begun(tracing, ("traceparent", parent)), (engine_pb2.End(reason=STOP), 1))
    assert not exporter.get_finished_spans()
