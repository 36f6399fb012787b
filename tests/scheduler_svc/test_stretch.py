"""Steps that follow from the one before are the very steps that the scheduler would have planned from its columns."""

from __future__ import annotations

import random

import pytest

from protos import plan_pb2
from scheduler_svc.plan_line import PlanLine, PlannedStep
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.support.simulated_cost import round_cost


def random_trace(seed: int) -> Trace:
    """Requests that come one by one and in bursts; some have a stop token before their `max_tokens`."""
    rng = random.Random(seed)
    arrivals = sorted(rng.choice([rng.uniform(0, 8), rng.randrange(8)]) for _ in range(40))
    requests = []
    for arrival_s in arrivals:
        output = rng.randint(1, 90)
        most = output + rng.choice([0, 0, rng.randint(1, 50)])
        requests.append(
            TraceRequest(arrival_s, rng.randint(1, 300), output, max_tokens=most, priority=rng.randint(0, 1))
        )
    return Trace(f"random-{seed}", tuple(requests))


def plans_of(setup: Setup, trace: Trace) -> list[bytes]:
    """All plans, without what differs from one engine to the next: ids and contexts of the admissions."""
    plans = []
    simulation = Simulation(trace, setup)
    send = simulation.runners.send_plan

    def note(session: int, number: int, plan: plan_pb2.Plan) -> None:
        send(session, number, plan)
        copy = plan_pb2.Plan.FromString(plan.SerializeToString())
        for admission in copy.admissions:
            admission.sequence_id, admission.context = 0, b""
        plans.append(copy.SerializeToString())

    simulation.runners.send_plan = note  # type: ignore[method-assign]
    simulation.run()
    return plans


@pytest.mark.parametrize("policy", ["fcfs", "static", "priority"])
@pytest.mark.parametrize("kv_tokens", [1024, 16384])
def test_the_same_plans_without_the_fast_path(policy: str, kv_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    trace = random_trace(seed)
    setup = Setup(
        round_cost(),
        policy=policy,
        kv_tokens=kv_tokens,
        depth=rng.randint(1, 3),
        slots=rng.choice([4, 16]),
        block_size=rng.choice([4, 16]),
        seed=seed,
        spread=0.1,
    )
    follow, followed = PlanLine.follow, 0

    def counted(line: PlanLine) -> PlannedStep | None:
        nonlocal followed
        step = follow(line)
        followed += step is not None
        return step

    monkeypatch.setattr(PlanLine, "follow", counted)
    fast = plans_of(setup, trace)
    monkeypatch.setattr(PlanLine, "follow", lambda line: None)
    assert fast == plans_of(setup, trace)
    assert followed, "no step took the fast path"
