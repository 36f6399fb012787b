"""Simulated copies: in order, behind what earlier plans compute, named by the results sent after their end."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from roster_protos import plan_pb2
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.simulator.simulated_copies import SimulatedCopies
from scheduler_svc.simulator.simulation import Setup, Simulation
from scheduler_svc.simulator.trace import Trace, TraceRequest
from tests.scheduler_svc.simulator.test_fast_forward import Recorded
from tests.support.simulated_cost import round_cost


def plan(loads: list[int], offloads: list[int]) -> plan_pb2.Plan:
    return plan_pb2.Plan(load_counts=pack(loads), offload_counts=pack(offloads))


def named(copies: SimulatedCopies, at: float) -> tuple[list[int], list[int]]:
    result = copies.named(plan_pb2.Result(), at)
    return np.frombuffer(result.loads_done, "<i4").tolist(), np.frombuffer(result.offloads_done, "<i4").tolist()


def test_each_direction_is_in_order_and_begins_behind_earlier_plans() -> None:
    copies = SimulatedCopies(load_block_s=0.001, offload_block_s=0.002)
    copies.start(plan([10, 5], [10]), begin_at=1.0)
    copies.start(plan([1], []), begin_at=1.001)
    assert copies.next_done_at == pytest.approx(1.01)
    assert named(copies, 1.009) == ([], [])
    assert named(copies, 1.0151) == ([1, 2], [])
    assert named(copies, 1.0201) == ([3], [1])
    assert copies.next_done_at == math.inf and named(copies, 9.0) == ([], [])


def test_a_result_that_names_nothing_is_shared() -> None:
    result = plan_pb2.Result()
    assert SimulatedCopies(0.0, 0.0).named(result, 1.0) is result


def turns(rng: random.Random, num_conversations: int = 12, num_turns: int = 5) -> Trace:
    """Returns conversations whose contexts together are larger than the cache, in turns that follow one another."""
    requests = []
    for turn in range(num_turns):
        for number in range(num_conversations):
            ids = tuple(number * 100 + block for block in range(8 + 2 * turn))
            at_s = turn * 3.0 * num_conversations / 4 + number * 0.7 + rng.random() / 10
            requests.append(TraceRequest(at_s, 64 * len(ids), 20, ids))
    return Trace("turns", tuple(sorted(requests, key=lambda request: request.arrival_s)), hash_block_tokens=64)


def setup(host_kv_tokens: int, **fields: object) -> Setup:
    return Setup(round_cost(), policy="fcfs", host_kv_tokens=host_kv_tokens, prefix_sharing=True, **fields)  # type: ignore[arg-type]


def test_what_the_cache_cannot_hold_is_hit_in_the_host_pool() -> None:
    trace = turns(random.Random(1))
    without, with_tier = Simulation(trace, setup(0)), Simulation(trace, setup(16_384, check=True))
    without.run()
    with_tier.run()
    cached = [sum(s.cached_tokens for s in each.engine.pool.schedulers.values()) for each in (without, with_tier)]
    (scheduler,) = with_tier.engine.pool.schedulers.values()
    assert scheduler.tiers is not None
    assert cached[1] > 2 * cached[0], cached
    assert scheduler.tiers.loads.counts.blocks and not scheduler.is_copying
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


@pytest.mark.parametrize("host_kv_tokens", [512, 16_384])
def test_a_fast_forward_beside_a_host_pool_changes_nothing(host_kv_tokens: int) -> None:
    trace = turns(random.Random(2), num_conversations=6, num_turns=4)
    fast, slow = (Recorded(trace, setup(host_kv_tokens, fast_forwards=each)) for each in (True, False))
    outcomes = [each.run() for each in (fast, slow)]
    assert fast.turns_skipped > 0 and fast.told == slow.told
    assert outcomes[0].token_times_s.tolist() == outcomes[1].token_times_s.tolist()
