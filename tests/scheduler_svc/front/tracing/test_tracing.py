"""Tracing: spans of every kind of call reach an OTLP collector; with tracing off, OpenTelemetry is not imported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider

from roster_client.client import RosterClient
from roster_client.client.errors import RosterError
from scheduler_svc.front.tracing import tracing
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.front_stack import front_stack
from tests.support.otlp_receiver import attributes, otlp_receiver

ROOT = Path(__file__).parents[4]


async def test_spans_of_calls_and_sessions_reach_the_collector_in_the_callers_trace() -> None:
    tracer = TracerProvider().get_tracer("caller")
    with otlp_receiver() as receiver:
        async with (
            front_stack(otlp_endpoint=receiver.endpoint) as stack,
            RosterClient(stack.address, tenant="acme", trace=True) as client,
        ):
            with tracer.start_as_current_span("caller") as span:
                parent = span.get_span_context()
                first = await client.generate("hello", max_tokens=7, request_id="one").completion()
                async with client.session() as session:
                    second = await session.generate("hello", max_tokens=3, request_id="two").completion()
                with pytest.raises(RosterError):
                    await client.generate("x", temperature=-1).completion()
            assert len(first.choices[0].token_ids) == 7 and len(second.choices[0].token_ids) == 3
            with otel.use_span(otel.INVALID_SPAN):
                await client.generate("hello", max_tokens=2, request_id="alone").completion()
        spans = await asyncio.to_thread(receiver.wait_for, 3 * 5 + 2)  # the worker exported all on exit
    roots = {attributes(span.attributes).get("gen_ai.response.id", "?"): span for span in spans if span.kind == 2}
    assert set(roots) == {"one", "two", "?", "alone"}
    for name, root in roots.items():
        same = root.trace_id.hex() == f"{parent.trace_id:032x}"
        assert same is (name != "alone")
        assert root.parent_span_id.hex() == (f"{parent.span_id:016x}" if same else "")
    assert attributes(roots["one"].attributes)["gen_ai.usage.output_tokens"] == 7
    assert attributes(roots["one"].attributes)["roster.tenant"] == "acme"
    assert attributes(roots["?"].attributes)["error.type"] == "INVALID_ARGUMENT"
    for name in ("one", "two"):
        phases = [span for span in spans if span.parent_span_id == roots[name].span_id]
        assert [span.name for span in sorted(phases, key=lambda s: (s.start_time_unix_nano, s.end_time_unix_nano))] == [
            "prepare",
            "queue",
            "prefill",
            "decode",
        ]
        assert roots[name].start_time_unix_nano == min(span.start_time_unix_nano for span in phases)
        assert roots[name].end_time_unix_nano == max(span.end_time_unix_nano for span in phases)
    assert receiver.resource["service.name"] == "roster"


async def test_an_unavailable_collector_affects_no_request() -> None:
    async with (
        front_stack(otlp_endpoint="http://127.0.0.1:9") as stack,
        RosterClient(stack.address) as client,
    ):
        answer = await client.generate("hello", max_tokens=5).completion()
        assert len(answer.choices[0].token_ids) == 5


def test_off_nothing_of_it_is_imported() -> None:
    script = (
        "import sys\n"
        "import scheduler_svc.main, scheduler_svc.operation.service, scheduler_svc.front.worker\n"
        "import roster_client.client, roster_client.cli\n"
        "from scheduler_svc.front.tracing.tracing import Tracing, check_tracing\n"
        "from scheduler_svc.settings.scheduler_settings import SchedulerSettings\n"
        "settings = SchedulerSettings()\n"
        "check_tracing(settings); Tracing.open(settings).begin(())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "[]", ended.stdout + ended.stderr


def test_without_the_packages_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORTER", "opentelemetry.exporter.nowhere.else")
    tracing.check_tracing(SchedulerSettings())
    with pytest.raises(tracing.TracingUnavailable, match=r"roster-serve\[tracing\]"):
        tracing.check_tracing(SchedulerSettings(otlp_endpoint="http://127.0.0.1:4317"))


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ValueError, match="otlp_endpoint"):
        SchedulerSettings(otlp_endpoint="collector:4317")
