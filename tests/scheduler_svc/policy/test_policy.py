"""The policy interface: built-in policies, the guard, loading by name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.policies.fcfs import Fcfs
from scheduler_svc.policies.orca import Orca
from scheduler_svc.policies.static import Static
from scheduler_svc.policy import (
    Accept,
    Budget,
    Load,
    Policy,
    PolicyGuard,
    PolicyParameters,
    Refuse,
    RequestView,
    RunningView,
    UnknownPolicy,
    WrongParameters,
    available_policies,
    load_policy,
)
from tests.support.in_process import Stack


def load(**changes: int) -> Load:
    fields = {
        "running": 4,
        "decoding": 3,
        "slots": 8,
        "waiting": 5,
        "waiting_tokens": 50,
        "free_blocks": 10,
        "blocks": 20,
        "block_size": 16,
        "max_step_tokens": 64,
    }
    return Load(**(fields | changes))


VIEW = RequestView("r", "t", 1.5, 0, 10, 20, 1)


def running(sequence_id: int, rank: tuple[Any, int]) -> RunningView:
    return RunningView(sequence_id, VIEW, rank, 10, 2, 1)


def test_fcfs_leaves_decoding_rows_their_place_and_prompts_at_least_one_position() -> None:
    policy = Fcfs(PolicyParameters(step_tokens=16))
    assert policy.budget(load()) == Budget(prefill_tokens=13)
    assert policy.budget(load(decoding=16)).prefill_tokens == 1
    assert Fcfs(PolicyParameters()).budget(load()).prefill_tokens == 61
    assert Fcfs(PolicyParameters(step_tokens=1000)).budget(load()).prefill_tokens == 61
    assert Fcfs(PolicyParameters(step_tokens=16, finish_tokens=20)).budget(load()) == Budget(13, overflow=4)
    assert Fcfs(PolicyParameters(step_tokens=16, finish_tokens=16)).budget(load()) == Budget(13)


def test_orca_never_splits_and_static_admits_no_sequence_meanwhile() -> None:
    assert not Orca(PolicyParameters()).budget(load()).may_chunk
    assert Static(PolicyParameters()).budget(load()).max_new == 0
    fresh = Static(PolicyParameters()).budget(load(running=0, decoding=0))
    assert (fresh.max_new, fresh.admit_ahead) == (8, True)


def test_static_batches_never_mix() -> None:
    rng = random.Random(5)
    stack = Stack(policy="static")
    session = stack.add_runner(
        HashBackend(num_slots=3, block_size=4, num_blocks=64, max_step_tokens=8, context_length=64, eos_probability=0)
    )
    joined: list[set[int]] = []
    stack.step()
    scheduler = stack.engine.pool.schedulers[session]
    for _ in range(10):
        stack.submit([1] * rng.randint(1, 12), rng.randint(1, 12))
    members: set[int] = set()
    while not stack.engine.requests.idle or not joined:
        stack.step()
        now = {sequence.id for sequence in scheduler.table.running()}
        if now - members:
            assert not (now & members), "somebody joined a batch under way"
            joined.append(now)
        members = now
        stack.runners.execute(session)
        stack.runners.deliver(session)
    assert [len(batch) for batch in joined] == [3, 3, 3, 1]


class Broken(Policy):
    """Every function fails, by raising or by an invalid answer."""

    name = "broken"

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(PolicyParameters())
        self.answers = answers

    def _answer(self, function: str) -> Any:
        answer = self.answers.get(function, ZeroDivisionError())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def admit(self, request: RequestView, load: Load) -> Accept | Refuse:
        return self._answer("admit")

    def key(self, request: RequestView, ledger: Ledger) -> Any:
        return self._answer("key")

    def budget(self, load: Load) -> Budget:
        return self._answer("budget")

    def victim(self, running: Any, candidate: RunningView) -> RunningView | None:
        return self._answer("victim")


NONSENSE = {
    "admit": "yes",
    "key": float("nan"),
    "budget": Budget(prefill_tokens=-1),
    "victim": running(99, ((9.0,), 9)),
}


@pytest.mark.parametrize("answers", [{}, NONSENSE])
def test_a_failing_policy_costs_a_counter_and_the_default_answers(answers: dict[str, Any]) -> None:
    guard = PolicyGuard(Broken(answers))
    low, high = running(1, ((1.0,), 1)), running(2, ((2.0,), 2))
    assert guard.admit(VIEW, load()) == Accept()
    assert guard.key(VIEW, Ledger()) == (1.5,)
    assert guard.budget(load()) == Budget(prefill_tokens=61)
    assert guard.victim([high], low) is high and guard.victim([low], high) is None
    assert guard.failures == 5 and guard.last_failure


def test_a_victim_must_rank_below_the_candidate() -> None:
    low, high = running(1, ((1.0,), 1)), running(2, ((2.0,), 2))
    guard = PolicyGuard(Broken({"victim": low}))
    assert guard.victim([low], high) is None
    assert guard.failures == 1


def test_streams_survive_a_broken_policy() -> None:
    rng = random.Random(6)
    stack = Stack(guard=PolicyGuard(Broken({})))
    stack.add_runner(
        HashBackend(num_slots=3, block_size=4, num_blocks=20, max_step_tokens=16, context_length=80, eos_probability=0)
    )
    requests = [stack.submit([rng.randrange(256)] * 7, 30) for _ in range(12)]
    stack.run(rng)
    for request in requests:
        assert request.first_sequence_id is not None
        assert stack.streams[request.first_sequence_id].tokens == request.expected(0, 0)
    assert stack.engine.policy.failures > 12


def test_a_refusal_of_the_policy_reaches_the_client() -> None:
    stack = Stack(guard=PolicyGuard(Broken({"admit": Refuse("not now", 2.5)})))
    stack.add_runner(HashBackend())
    refused = stack.submit([1], 3).handle
    stack.step()
    answer = stack.requests[refused].refused
    assert answer is not None and (answer.message, answer.retry_after_ms) == ("not now", 2500)


def test_policies_are_found_by_name_and_errors_list_what_exists() -> None:
    assert {"fcfs", "orca", "static"} <= set(available_policies())
    assert load_policy("fcfs", {"step_tokens": 7}).parameters.step_tokens == 7
    with pytest.raises(UnknownPolicy, match=r"no policy 'fcsf'.*fcfs.*orca.*static"):
        load_policy("fcsf", {})
    with pytest.raises(WrongParameters, match=r"steptokens.*It knows: victim, step_tokens"):
        load_policy("fcfs", {"steptokens": 7})
    with pytest.raises(WrongParameters, match="greater than or equal to 1"):
        load_policy("fcfs", {"step_tokens": 0})
    with pytest.raises(WrongParameters, match=r"finish_tokens \(8\) is below step_tokens \(16\).*It knows: victim"):
        load_policy("sjf", {"step_tokens": 16, "finish_tokens": 8})
    with pytest.raises(WrongParameters, match="set step_tokens too"):
        load_policy("sjf", {"finish_tokens": 1152})


def test_the_overflow_of_a_budget_within_a_bound_stays_within_it() -> None:
    budget = Budget(100, overflow=28)
    assert budget.within(float("inf")) == budget.within(128) == budget
    assert budget.within(110.5) == Budget(100, overflow=10)
    assert budget.within(63.7) == Budget(63)


def test_the_former_name_of_a_budgets_overflow_is_accepted_for_one_release() -> None:
    """A policy that uses the former name must not fall back to `fcfs`."""

    class Former(Policy):
        name = "former"

        def budget(self, load: Load) -> Budget:
            budget = Budget(100, stretch=28)
            assert budget.stretch == 28 and budget._replace(prefill_tokens=5).overflow == 28
            return budget

    guard = PolicyGuard(Former(PolicyParameters()))
    with pytest.warns(FutureWarning, match="overflow"):
        assert guard.budget(load()) == Budget(100, overflow=28)
    assert guard.failures == 0
