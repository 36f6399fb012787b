"""Prompts get a step's budget in order of rank, whether they are under way or waiting."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runner_svc.backends.hash_backend import HashBackend
from tests.support.in_process import Stack


def stack_of(policy: str, **parameters: object) -> tuple[Stack, int]:
    stack = Stack(policy=policy, policy_parameters=parameters, prefix_sharing=False)
    backend = HashBackend(num_slots=4, block_size=4, num_blocks=64, max_step_tokens=16, eos_probability=0.0)
    session = stack.add_runner(backend)
    stack.step()
    return stack, session


def steps_until_first_token(policy: str, **parameters: object) -> tuple[int, int]:
    """Returns the steps of a prompt of 80 tokens, and of one of 8 tokens that arrives after its first chunks."""
    stack, session = stack_of(policy, **parameters)
    long = stack.submit(list(range(80)), 4)
    stack.step()
    short = stack.submit(list(range(8)), 4)
    first: dict[int, int] = {}
    for step in range(20):
        stack.step()
        stack.runners.execute(session)
        stack.runners.deliver(session)
        for name, request in enumerate((long, short)):
            if request.first_sequence_id is not None and stack.streams[request.first_sequence_id].tokens:
                first.setdefault(name, step)
    return first[0], first[1]


def test_a_short_prompt_goes_ahead_of_the_rest_of_a_long_one_under_sjf() -> None:
    long, short = steps_until_first_token("sjf")
    assert short < long


def test_it_waits_for_the_long_one_under_fcfs() -> None:
    long, short = steps_until_first_token("fcfs")
    assert long <= short


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "orca", "priority", "fair"])
def test_no_step_exceeds_its_budget(policy: str) -> None:
    stack, session = stack_of(policy)
    for length in (40, 9, 30, 3, 21):
        stack.submit(list(range(length)), 6)
        stack.step()
        for _, plan in stack.runners.plans[session]:
            assert np.frombuffer(plan.extent_counts, "<i4").sum() <= 16
        stack.runners.execute(session)
        stack.runners.deliver(session)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority", "fair", "adaptive", "deadline"])
def test_a_step_exceeds_step_tokens_only_to_finish_a_prompt(policy: str) -> None:
    stack, session = stack_of(policy, step_tokens=10, finish_tokens=14)
    rng, longest = random.Random(5), 0
    for _ in range(60):
        stack.submit(list(range(rng.randrange(1, 40))), 3)
        stack.step()
        for _, plan in stack.runners.plans[session]:
            positions = int(np.frombuffer(plan.extent_counts, "<i4").sum())
            assert positions <= 10 or (positions <= 14 and plan.extent_flags[-1] == 1)
            longest = max(longest, positions)
        stack.runners.execute(session)
        stack.runners.deliver(session)
    assert longest > 10


def test_a_short_rest_needs_no_step_of_its_own() -> None:
    def steps(**parameters: object) -> int:
        stack, session = stack_of("fcfs", step_tokens=10, **parameters)
        request = stack.submit(list(range(13)), 1)
        for number in range(1, 10):
            stack.step()
            stack.runners.execute(session)
            stack.runners.deliver(session)
            if request.first_sequence_id is not None and stack.streams[request.first_sequence_id].tokens:
                return number
        raise AssertionError("no token")

    assert steps(finish_tokens=13) == steps(finish_tokens=12) - 1
