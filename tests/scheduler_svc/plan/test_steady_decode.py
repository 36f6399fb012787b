"""Steps derived from the previous plan equal those that the scheduler would have planned from its columns."""

from __future__ import annotations

import random

import pytest

from roster_protos import plan_pb2
from scheduler_svc.plan.plan_builder import PlanBuilder, PlannedStep
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.trace import Trace
from tests.support.random_traces import random_trace
from tests.support.simulated_cost import round_cost
from tests.support.thoroughness import choice, count

NUM_REQUESTS = count(40, in_ci=24)


def plans_of(setup: Setup, trace: Trace) -> list[bytes]:
    """Returns all plans, without what differs between engines: ids and contexts of the admissions."""
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


def random_setup(seed: int, policy: str, kv_tokens: int) -> Setup:
    rng = random.Random(seed)
    return Setup(
        round_cost(),
        policy=policy,
        kv_tokens=kv_tokens,
        depth=rng.randint(1, 3),
        slots=rng.choice([4, 16]),
        block_size=rng.choice([4, 16]),
        seed=seed,
        spread=0.1,
        fast_forwards=False,
    )


@pytest.mark.parametrize(
    ("policy", "kv_tokens"),
    choice(
        [(policy, kv_tokens) for kv_tokens in (1024, 16384) for policy in ("fcfs", "static", "priority")],
        in_ci=[("fcfs", 1024), ("priority", 1024), ("static", 16384)],
    ),
)
def test_the_same_plans_without_the_fast_path(policy: str, kv_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    trace, setup = random_trace(seed, NUM_REQUESTS), random_setup(seed, policy, kv_tokens)
    follow, followed = PlanBuilder.follow, 0

    def counted(line: PlanBuilder) -> PlannedStep | None:
        nonlocal followed
        step = follow(line)
        followed += step is not None
        return step

    monkeypatch.setattr(PlanBuilder, "follow", counted)
    fast = plans_of(setup, trace)
    monkeypatch.setattr(PlanBuilder, "follow", lambda line: None)
    assert fast == plans_of(setup, trace)
    assert followed, "no step took the fast path"


@pytest.mark.parametrize("kv_tokens", choice([1024, 16384], in_ci=[1024]))
def test_the_same_victims_if_all_are_looked_at(kv_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on running ranks only saves comparisons."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    trace, setup = random_trace(seed, NUM_REQUESTS), random_setup(seed, "priority", kv_tokens)
    bounded = plans_of(setup, trace)
    monkeypatch.setattr(SlotTable, "lowest", property(lambda table: None, lambda table, rank: None), raising=False)
    assert bounded == plans_of(setup, trace)
