"""The whole engine with the default's own lengths of drafts, and with policies that decide or fail."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.policy import DraftRows, Drafts, Load, Policy, PolicyGuard, PolicyParameters
from tests.support.drafters import drafting_backend
from tests.support.in_process import Stack

EOS_PROBABILITY = 0.0


class MostDrafts(Policy):
    """Drafts as much as it may."""

    name = "most"

    def drafts(self, load: Load, rows: DraftRows) -> npt.NDArray[np.int32]:
        assert load.decoding == len(rows) == len(rows.acceptance)
        assert all(rows.request(row).tenant == "t" for row in range(len(rows)))
        return rows.most


class Chaotic(Policy):
    """Fails in most of its answers."""

    name = "chaotic"
    rng = random.Random(5)

    def drafts(self, load: Load, rows: DraftRows) -> Drafts:
        answers: list[Any] = [None, "x", [-1] * len(rows), rows.acceptance, rows.most]
        answer: Drafts = self.rng.choice(answers)
        return answer


def run(policy: Policy, wrong: float) -> tuple[int, int, PolicyGuard]:
    """Returns the drafted and accepted tokens of some requests, whose streams are exact."""
    rng = random.Random(2)
    guard = PolicyGuard(policy)
    stack = Stack(depth=2, guard=guard)
    stack.time_plans(1)
    sizes = {"num_slots": 4, "block_size": 4, "num_blocks": 120, "max_step_tokens": 64, "context_length": 128}
    backend = drafting_backend(
        HashBackend, rng, wrong=wrong, lies=False, max_drafts=7, eos_probability=EOS_PROBABILITY, **sizes
    )
    stack.add_runner(backend)
    requests = [stack.submit([number, 2, 3], 60, seed=number, tenant="t") for number in range(3)]
    stack.run(rng)
    for request in requests:
        assert request.streams[0].tokens == request.expected(0, EOS_PROBABILITY)
    stack.assert_clean()
    totals = stack.engine.snapshots.take_snapshot().status.totals
    return totals.drafted_tokens, totals.accepted_tokens, guard


@pytest.mark.parametrize("wrong", [0.05, 1.0])
def test_the_default_drafts_where_drafts_are_accepted(wrong: float) -> None:
    drafted, accepted, guard = run(Policy(PolicyParameters()), wrong)
    assert drafted > 0
    assert drafted < 150 if wrong == 1.0 else accepted > 0.6 * drafted
    assert not guard.failures


def test_a_plan_has_at_most_the_sampled_positions_that_hello_states() -> None:
    stack = Stack(depth=2, guard=PolicyGuard(MostDrafts(PolicyParameters())))
    backend = drafting_backend(
        HashBackend, random.Random(1), wrong=0.0, lies=False, max_drafts=7, num_slots=4, block_size=4, num_blocks=120
    )
    backend.max_sampled = 9  # type: ignore[attr-defined]
    session = stack.add_runner(backend)
    for number in range(3):
        stack.submit([number, 2, 3], 60, seed=number, tenant="t")
    most = 0
    for _ in range(12):
        stack.step()
        plans = [plan for _, plan in stack.runners.plans[session] if plan.extent_drafts]
        most = max([most, *(int(np.frombuffer(plan.extent_counts, "<i4").sum()) for plan in plans)])
        stack.whole_turn(session)
    assert most == 9


def test_policies_decide_how_much_is_drafted() -> None:
    drafted, accepted, guard = run(MostDrafts(PolicyParameters()), 0.0)
    assert accepted == drafted > 100
    assert not guard.failures, guard.last_failure


def test_a_policy_that_fails_costs_drafts_and_nothing_else() -> None:
    drafted, _, guard = run(Chaotic(PolicyParameters()), 0.0)
    assert guard.failures > 5
    assert drafted > 20
