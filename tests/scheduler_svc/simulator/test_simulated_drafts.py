"""Simulated drafts: positions follow the runner's own counters, and what is right depends on the request alone."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.report.report import Targets, report
from scheduler_svc.simulator.report.report_table import report_table
from scheduler_svc.simulator.simulated_drafts import Run, SimulatedDrafts, WrongAcceptance
from scheduler_svc.simulator.simulation import Setup, Simulation, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.scripted_drafts import Always, RandomDrafts, drafts_of
from tests.support.simulated_cost import round_cost
from tests.support.thoroughness import count as how_many

MOST = 5


def plan(rows: list[tuple[int, int, int, int]], admitted: dict[int, str] | None = None) -> plan_pb2.Plan:
    """Returns a plan of rows (slot, start, count, drafts) that all sample; `admitted`: request by slot, 10 tokens."""
    slots, starts, counts, drafts = zip(*rows, strict=True)
    made = plan_pb2.Plan(
        extent_slots=pack(list(slots)), extent_starts=pack(list(starts)), extent_counts=pack(list(counts))
    )
    made.extent_flags = b"\1" * len(rows)
    if any(drafts):
        made.extent_drafts = bytes(drafts)
    for slot, request_id in (admitted or {}).items():
        context = engine_pb2.SequenceContext(submit=engine_pb2.Submit(request_id=request_id))
        made.admissions.add(slot=slot, tokens=pack([1] * 10), prompt_len=10, context=context.SerializeToString())
    return made


def generated(
    drafts: SimulatedDrafts, lengths: list[int], request_id: str = "r"
) -> tuple[set[int], set[int], list[Run]]:
    """Returns the positions of accepted and of rejected drafts, and all runs; `lengths`: k of each step."""
    runs = [drafts.run(1, plan([(2, 0, 10, 0)], {2: request_id}))]
    for k in lengths:
        runs.append(drafts.run(1, plan([(2, -1, 1 + k, k)])))
    accepted: set[int] = set()
    rejected: set[int] = set()
    for before, run in pairwise(runs):
        assert run.first == before.first + before.token_counts, "it goes on where the row before ended"
        assert run.starts == run.first - 1 and 1 <= run.token_counts <= 1 + run.drafted
        first, count = int(run.first[0]), int(run.token_counts[0]) - 1
        accepted.update(range(first, first + count))
        rejected.update([first + count] if count < run.drafted[0] else [])
    return accepted, rejected, runs


def test_each_place_has_its_share() -> None:
    shares = (0.9, 0.5, 0.2)
    drafts = SimulatedDrafts(1, 4, MOST, shares, 7, {})
    *_, runs = generated(drafts, [MOST] * 2000)
    accepted = np.array([int(run.token_counts[0]) - 1 for run in runs[1:]])
    for place, share in enumerate((*shares, 0.2)):
        tried = (accepted >= place).sum()
        assert (accepted > place).sum() / tried == pytest.approx(share, abs=4 * (share * (1 - share) / tried) ** 0.5)


def test_what_is_right_depends_on_the_request_alone() -> None:
    """With an equal share at all places, a position's draft is right or wrong however long the runs are."""
    drafts, rng = SimulatedDrafts(2, 4, MOST, (0.6,), 3, {"own": (1.0,), "none": (0.0,)}), np.random.default_rng(1)
    right, wrong, _ = generated(drafts, [MOST] * 300)
    for lengths in ([1] * 300, rng.integers(0, 4, 300).tolist()):
        accepted, rejected, _ = generated(drafts, lengths)
        assert not accepted & wrong and not rejected & right and len(accepted & right) > 50
    assert generated(drafts, [MOST] * 300)[:2] == (right, wrong)
    assert generated(drafts, [MOST] * 300, "other")[0] & wrong, "each request has its own"
    assert generated(SimulatedDrafts(1, 4, MOST, (0.6,), 4, {}), [MOST] * 300)[0] & wrong, "and each seed"
    assert len(generated(drafts, [MOST] * 10, "own")[0]) == 10 * MOST
    assert not generated(drafts, [MOST] * 10, "none")[0]


@pytest.mark.parametrize("acceptance", [(), (1.5,), (0.5, -0.1)])
def test_impossible_shares_are_refused(acceptance: tuple[float, ...]) -> None:
    with pytest.raises(WrongAcceptance, match="from 0 to 1"):
        SimulatedDrafts(1, 1, MOST, acceptance, 0, {})


def some_requests(count: int, **fields: object) -> Trace:
    rng = random.Random(3)
    arrivals = sorted(rng.uniform(0, 3) for _ in range(count))
    requests = (TraceRequest(at, rng.randint(1, 200), rng.randint(1, 60), **fields) for at in arrivals)  # type: ignore[arg-type]
    return Trace("some", tuple(requests))


@pytest.mark.parametrize("depth", [1, 3])
def test_random_lengths_lose_no_token_and_no_sequence(depth: int) -> None:
    """With preemptions, requests that stop before their maximum, and the scheduler's own checks."""
    trace = some_requests(how_many(60, in_ci=25), max_tokens=70)
    setup = Setup(round_cost(), kv_tokens=512, depth=depth, max_drafts=MOST, acceptance=(0.8, 0.5), check=True)
    with drafts_of(RandomDrafts(random.Random(depth))):
        outcome = simulate(trace, setup)
    assert outcome.tokens.tolist() == [request.output_tokens for request in trace.requests]
    counters = outcome.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens and counters.preemptions > 0
    assert (outcome.itl_s == 0).any(), "tokens of a step come together"


def test_a_step_that_verifies_costs_by_its_positions() -> None:
    """One request alone: a prompt of 10, then steps of 4 positions of which all are accepted."""
    trace, cost = Trace("one", (TraceRequest(0.0, 10, 13),)), round_cost(sequence_s=0.001)
    with drafts_of(Always(3)):
        outcome = simulate(trace, Setup(cost, scheduler_s=0.0, depth=1, max_drafts=3, acceptance=(1.0,)))
    steps_s = outcome.itl_s[outcome.itl_s > 1e-9]
    assert steps_s == pytest.approx([0.01 + 0.0004 + 0.001] * 3)
    one = report(outcome, "auto", Targets())
    assert (one.drafted_tokens, one.accepted_tokens, one.tokens_per_row) == (9, 9, 4)
    assert one.accepted_per_step == 9 / 4 and outcome.counters.step_tokens == 10 + 3 * 4
    assert "accepted drafts per step" in list(report_table("x", [one]).columns[0].cells)


def test_the_policy_drafts_what_pays() -> None:
    """On runners whose steps cost by the step, not by the position; requests of a trace may have acceptances of their
    own, and drafts that are always wrong cost next to nothing."""
    trace, cost = some_requests(how_many(40, in_ci=15)), round_cost(free_tokens=256)
    own = some_requests(len(trace.requests), acceptance=(0.9,))

    def simulated(trace: Trace, acceptance: float, max_drafts: int = MOST) -> Outcome:
        return simulate(trace, Setup(cost, max_drafts=max_drafts, acceptance=(acceptance,)))

    plain, right, wrong, mine = simulated(trace, 0, 0), simulated(trace, 0.9), simulated(trace, 0), simulated(own, 0)
    assert right.counters.plans < 0.6 * plain.counters.plans
    assert mine.token_times_s.tobytes() == right.token_times_s.tobytes()
    assert wrong.e2e_s.mean() < 1.02 * plain.e2e_s.mean() and wrong.counters.accepted_tokens == 0
    assert plain.counters.drafted_tokens == 0 < plain.counters.decode_rows


def test_the_estimated_gain_is_that_of_the_recent_steps() -> None:
    """A step takes as long with drafts, so the gain is the tokens of a row: 1 + 0.9 + 0.81 + ... of 5 drafts."""
    for share, expected in ((0.9, 4.7), (0.0, 1.0)):
        setup = Setup(round_cost(token_s=0.0), max_drafts=MOST, acceptance=(share,))
        simulation = Simulation(Trace("long", (TraceRequest(0.0, 10, 2000),)), setup)
        reports = simulation.engine.reports
        simulation.turn()
        assert [runner.draft_gain for runner in reports.status().runners] == [1], "nothing was drafted"
        while simulation.runners.tallies.steps < 250:
            simulation.clock.now_s = max(
                simulation.clock.now_s, min(simulation.front.next_s, simulation.runners.next_s)
            )
            simulation.turn()
        (runner,) = reports.status().runners
        assert runner.draft_gain == pytest.approx(expected, rel=0.15)
