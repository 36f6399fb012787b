"""The reports that policies receive of each result, against the streams of the simulation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from scheduler_svc.policy import Policy, PolicyParameters, StepReport
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.trace import TraceRequest
from tests.support.arrivals import merged, poisson
from tests.support.simulated_cost import round_cost


class Recorder(Policy):
    """Records the reports."""

    name = "recorder"

    def __init__(self) -> None:
        super().__init__(PolicyParameters())
        self.reports: list[StepReport] = []

    def observe(self, report: StepReport) -> None:
        self.reports.append(report)


@pytest.mark.parametrize("setup", [{}, {"kv_tokens": 1600}], ids=["plenty", "preempting"])
def test_reports_agree_with_the_streams(setup: dict[str, Any]) -> None:
    rng = random.Random(1)
    trace = merged([TraceRequest(t, rng.randint(5, 400), rng.randint(1, 60)) for t in poisson(rng, 4, 0, 15)])
    recorder = Recorder()
    simulation = Simulation(trace, Setup(round_cost(), policy=recorder, scheduler_s=0.0, **setup))
    outcome = simulation.run()
    reports = recorder.reports
    assert outcome.counters.policy_failures == 0
    assert len(reports) == outcome.counters.plans
    assert sum(report.sampled for report in reports) >= outcome.tokens.sum()
    assert sum(report.decode_rows + report.prefill_tokens for report in reports) == outcome.counters.step_tokens
    assert sum(report.step_s for report in reports) == pytest.approx(outcome.counters.busy_s)
    first = {first.request.request_id: first.ttft_s for report in reports for first in report.first_tokens}
    ended = {end.request.request_id: end.generated for report in reports for end in report.ended}
    assert [first[str(i)] for i in range(len(trace.requests))] == pytest.approx(outcome.ttft_s.tolist())
    # the last ends may lack a further result with which to be reported
    assert len(ended) >= len(trace.requests) - 8
    assert all(generated == trace.requests[int(i)].output_tokens for i, generated in ended.items())
    gaps_s = np.concatenate([report.gaps_s for report in reports])
    assert not np.isnan(gaps_s).any()
    if not setup:
        assert np.sort(gaps_s) == pytest.approx(np.sort(outcome.itl_s))


def test_a_step_is_reported_with_its_work() -> None:
    """One prompt of 300 in chunks of 256 and 44, then four decoding steps over a growing context."""
    recorder = Recorder()
    trace = merged([TraceRequest(0.0, 300, 5)])
    Simulation(trace, Setup(round_cost(), policy=recorder, depth=1)).run()
    rows = [(r.prefill_tokens, r.decode_rows, r.context, r.sampled) for r in recorder.reports]
    assert rows == [(256, 0, 0, 0), (44, 0, 0, 1), *((0, 1, 300 + i, 1) for i in range(4))]
