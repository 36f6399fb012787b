"""The report: complete, self-contained, and with warnings about distorted numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from roster_client.bench.records.record import LoopDelays, RequestRecord, Run, RunHeader, ServiceSample, Status
from roster_client.bench.records.series import itl_over_time
from roster_client.bench.records.summary import Targets
from roster_client.bench.report.html_report import report_page
from tests.support.pages import checked


def a_run(system: str, rate: float | None, *, card: str = "a card", count: int = 12, loop_s: float = 0.0) -> Run:
    header = RunHeader(
        system, "grpc://x", "m", "trace <1>", "Poisson", card, f"roster bench --name {system}", rate=rate
    )
    requests = [
        RequestRecord(
            str(n), n * 0.5, n * 0.5, Status.OK, 3, 10, 3, (n * 0.5 + 0.1, n * 0.5 + 0.2, n * 0.5 + 0.4), (1, 1, 1)
        )
        for n in range(count)
    ]
    samples = [ServiceSample(n * 0.25, n % 3, 4) for n in range(2 * count)]
    return Run(header, requests, samples, LoopDelays(0.01, 9, 0.0, loop_s, loop_s, 0.1))


def test_one_run() -> None:
    page = checked(report_page("Serving: x", [a_run("fcfs", 2.0)], Targets(), ["said <first>"]))
    assert page.count("<svg") == 2
    assert "said &lt;first&gt;" in page and "trace &lt;1&gt;" in page
    assert "roster bench --name fcfs" in page and "12 / 12" in page
    assert 'class="warning"' not in page


def test_rates_of_a_system_are_drawn_against_each_other() -> None:
    runs = [a_run(system, rate) for system in ("fcfs", "static") for rate in (1.0, 2.0)]
    page = checked(report_page("Sweep", runs, Targets()))
    assert page.count("<svg") == 3
    assert "offered rate" in page


def test_systems_under_one_load_are_drawn_as_bars_with_their_numbers() -> None:
    nothing = Run(a_run("x", None).header, [RequestRecord("x", 0.0, 0.0, Status.FAILED, 3, error="no")])
    page = checked(report_page("Two", [a_run("fcfs", None), a_run("static", None), nothing], Targets()))
    assert page.count("<svg") == 3 and "Comparison of the runs" in page
    bars = page[page.index("<svg") : page.index("</svg>")]
    assert bars.count(">0.1 | 0.1<") == 2, "TTFT of the two runs that served requests"
    assert bars.count(">150 | 200<") == 2, "ITL, ms"
    assert checked(report_page("Nothing", [nothing, nothing], Targets())).count("<svg") == 2


def test_distortions_of_the_numbers_are_reported_first() -> None:
    slow = a_run("slow", None, loop_s=0.09)
    failing = a_run("failing", None, card="another card")
    failing.requests += [
        RequestRecord("x", 0.0, 0.0, Status.REFUSED, 3, error="the queue is full"),
        RequestRecord("y", 0.0, 0.0, Status.OK, 9, 10, 1, (0.3,), (1,)),
    ]
    page = checked(report_page("Two", [slow, failing], Targets()))
    head = page[: page.index("<table>")]
    assert "different hardware" in head
    assert "slow: the client was the bottleneck" in head and "90.0 ms late" in head
    assert "failing: not all requests were served: 1 refused" in head
    assert "1 answers ended before the requested length" in head
    assert "1 × refused: the queue is full" in page


def test_a_run_that_served_nothing_has_a_page() -> None:
    run = Run(a_run("x", 1.0).header, [RequestRecord("x", 0.0, 0.0, Status.FAILED, 3, error="no")])
    page = checked(report_page("Nothing", [run], Targets()))
    assert "0 / 1" in page and "–" in page


def test_a_line_of_latencies_ends_where_no_token_comes() -> None:
    busy = a_run("a", 2.0)
    (first, *_) = busy.requests
    late = replace(first, scheduled_s=first.scheduled_s + 9, message_s=[time_s + 9 for time_s in first.message_s])
    run = replace(busy, requests=[first, late])
    middles, p50, p99 = itl_over_time(run)
    idle = (middles > first.message_s[-1] + 1) & (middles < late.message_s[0] - 1)
    assert idle.sum() > 5 and np.isnan(p50[idle]).all() and np.isnan(p99[idle]).all()
    assert np.isfinite(p50[~np.isnan(p50)]).all() and np.isfinite(p50).sum() >= 2
    assert "<svg" in report_page("gap", [run], Targets(1, 0.1))


def test_tables_are_as_wide_as_their_numbers() -> None:
    style = re.search(r"<style>(.*?)</style>", report_page("one", [a_run("a", 1.0)], Targets(1, 0.1)), re.S)
    assert style is not None and not re.search(r"\ntable \{[^}]* width: 100%", style[1])
    assert not re.search(r"\ntbody th \{[^}]*width: 1%", style[1]), "it would widen the table"
