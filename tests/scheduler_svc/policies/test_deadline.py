"""`deadline` on the simulator: more requests meet their targets than with `fcfs`; late ones are refused on arrival."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler_svc.policies.pending_deadlines import Pace, PendingDeadlines
from scheduler_svc.policy import RequestView
from scheduler_svc.simulator.cost_model import CostModel, RunnerShape
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.report.report import Targets, report
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.arrivals import merged, poisson
from tests.support.thoroughness import choice, count

COST = CostModel(
    name="small",
    fixed_s=0.01,
    token_s=5e-5,
    sequence_s=2e-5,
    context_s=5e-8,
    runner=RunnerShape(slots=32, kv_tokens=100_000, step_tokens=2048),
)


def bursts(seed: int, rate: float) -> Trace:
    """A steady stream with bursts; half the clients want their first token in 0.8 s, half in 6 s."""
    rng = random.Random(seed)
    times = [
        t
        for begin in (0, 14)
        for t in poisson(rng, 5 * rate, begin, begin + 14) + poisson(rng, 16 * rate, begin + 2, begin + 6)
    ]
    return merged(
        [
            TraceRequest(
                t,
                rng.randint(300, 2500),
                min(300, max(1, int(rng.lognormvariate(3.5, 0.9)))),
                ttft_target_ms=rng.choice((800, 6000)),
                itl_target_ms=100,
            )
            for t in times
        ]
    )


def run(trace: Trace, policy: str, runners: int = 1, **parameters: object) -> Outcome:
    outcome = simulate(trace, Setup(COST, policy=policy, parameters=parameters, spread=0.05, runners=runners))
    assert outcome.counters.policy_failures == 0
    return outcome


def late_share(outcome: Outcome) -> float:
    """Returns the share of accepted requests whose first token was late."""
    targets_ms = [outcome.trace.requests[i].ttft_target_ms or 0 for i in outcome.served.tolist()]
    return float((outcome.ttft_s > np.array(targets_ms) / 1000).mean())


@pytest.mark.parametrize(
    ("rate", "ratio", "late"), choice([(1.0, 1.4, 0.01), (1.5, 3.0, 0.1)], in_ci=[(1.5, 3.0, 0.1)])
)
def test_more_requests_are_in_time_than_first_come_first_served(rate: float, ratio: float, late: float) -> None:
    trace = bursts(1, rate)
    fcfs, deadline = run(trace, "fcfs"), run(trace, "deadline")
    goodputs = [report(outcome, "", Targets()).goodput for outcome in (fcfs, deadline)]
    print(goodputs, len(deadline.refusals), late_share(fcfs), late_share(deadline))
    assert goodputs[1] > ratio * goodputs[0]
    assert late_share(deadline) <= late, "refused when it comes, not served late"
    assert len(deadline.refusals) < len(trace.requests) * late_share(fcfs)
    assert all("first token" in reason for reason in deadline.refusals.values())


def test_two_runners_are_trusted_with_twice_as_much() -> None:
    """The wait is estimated from both runners' work: no request is refused because of the other's decoding rows."""
    refused, late = np.zeros(2), np.zeros(2)
    seeds = count(6, in_ci=1)
    for seed in range(1, 1 + seeds):
        for place, runners in enumerate((1, 2)):
            outcome = run(bursts(seed, float(runners)), "deadline", runners, step_tokens=512)
            refused[place] += len(outcome.refusals) / len(outcome.trace.requests) / seeds
            late[place] += late_share(outcome) / seeds
    print(refused, late)
    assert refused[1] < refused[0], "two runners even bursts out better than one"
    assert late[0] < 0.005 and late[1] < 0.03


@pytest.mark.parametrize("runners", choice([1, 2, 4], in_ci=[2]))
def test_one_runner_computes_a_whole_prompt(runners: int) -> None:
    """The prompt takes 1.4 s on one runner, and no other runner computes any of it."""
    rng = random.Random(1)
    short = [TraceRequest(t, 300, 20, ttft_target_ms=6000) for t in poisson(rng, 3, 0, 40)]
    long = [TraceRequest(12.0 + 4 * i, 20_000, 5, ttft_target_ms=1000) for i in range(7)]
    outcome = run(merged(short + long), "deadline", runners, step_tokens=512)
    assert {outcome.trace.requests[i].prompt_tokens for i in outcome.refusals} == {20_000}
    assert len(outcome.refusals) == 7


def test_steps_are_short_enough_for_the_tightest_itl_target() -> None:
    trace = bursts(2, 0.7)
    assert np.percentile(run(trace, "fcfs").itl_s, 99) > 0.11
    assert np.percentile(run(trace, "deadline").itl_s, 99) <= 0.1


def test_without_targets_no_request_is_refused() -> None:
    rng = random.Random(3)
    trace = merged([TraceRequest(t, rng.randint(300, 2500), 30) for t in poisson(rng, 40, 0, 6)])
    outcome = run(trace, "deadline")
    assert not outcome.refusals
    assert (np.diff(outcome.first_token_s) >= 0).all(), "in order of arrival"


def promised(name: str, tokens: int) -> RequestView:
    return RequestView(name, "t", 0.0, 0, tokens, 10, 1)


def test_pending_first_tokens_before_and_after_a_request_count() -> None:
    pending, pace = PendingDeadlines(), Pace(tokens_per_s=100, num_runners=1, ends_per_s=2, free_slots=10, step_s=0.5)
    for name, due_at, tokens in (("a", 2.0, 100), ("b", 5.0, 200), ("c", 9.0, 50)):
        pending.add(promised(name, tokens), due_at)
    assert pending.wait_s(3.0, 50, pace) == pytest.approx(1.5 + 0.5)
    assert pending.wait_s(1.0, 50, pace) == pytest.approx(0.5 + 0.5)
    assert not pending.breaks(3.0, 150, pace, now_s=0.0), "b: 4.5 + 0.5 s"
    assert pending.breaks(3.0, 151, pace, now_s=0.0)
    crowded = Pace(tokens_per_s=1e9, num_runners=1, ends_per_s=2, free_slots=0, step_s=0.5)
    assert pending.wait_s(20.0, 1, crowded) == pytest.approx(4 / 2 + 0.5)
    pending.keep(promised("b", 200), 5.0)
    assert pending.wait_s(20.0, 0, pace) == pytest.approx(1.5 + 0.5)
    pending.keep(promised("unknown", 1), 9.0)
    assert len(pending) == 2
    pending.expire(now_s=8.0)
    assert len(pending) == 1


@pytest.mark.parametrize("runners", [1, 3])
def test_pending_deadlines_against_a_list(runners: int) -> None:
    rng = random.Random(4)
    pending, owed = PendingDeadlines(), dict[str, tuple[float, int]]()
    pace = Pace(tokens_per_s=50, num_runners=runners, ends_per_s=1, free_slots=3, step_s=0.1)
    for number in range(400):
        name, due_at, tokens = str(number), float(rng.randrange(40)), rng.randrange(1, 90)
        ahead = [t for d, t in owed.values() if d <= due_at]
        expected = max((sum(ahead) / runners + tokens) / 50, max(0, len(ahead) + 1 - 3) / 1) + 0.1
        assert pending.wait_s(due_at, tokens, pace) == pytest.approx(expected)
        pending.add(promised(name, tokens), due_at)
        owed[name] = (due_at, tokens)
        if len(owed) > 30:
            gone = rng.choice(list(owed))
            due_at, tokens = owed.pop(gone)
            pending.keep(promised(gone, tokens), due_at)
        assert len(pending) == len(owed)
