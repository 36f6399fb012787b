"""A `Stack` whose hash runners take part in moves, and the checks of what moves must leave behind."""

from __future__ import annotations

import random

from runner_svc.backends.hash_backend import HashBackend
from tests.support.fake_moves import FakeMoves
from tests.support.in_process import Stack


def moving_stack(
    *roles: str, rng: random.Random | None = None, num_blocks: int = 256, num_slots: int = 8, **settings: object
) -> Stack:
    """Returns a stack with a runner of each role; `rng` draws the fate of messages about moves."""
    stack = Stack(**settings)  # type: ignore[arg-type]
    stack.runners.moves = FakeMoves(stack.runners.runners, rng)
    for role in roles:
        add_runner(stack, role, num_blocks, num_slots)
    stack.step()
    return stack


def add_runner(stack: Stack, role: str = "", num_blocks: int = 256, num_slots: int = 8) -> int:
    """Adds a runner; returns its session."""
    stack.runners.roles[f"runner-{stack._sessions + 1}"] = role
    backend = HashBackend(num_slots=num_slots, num_blocks=num_blocks, block_size=4, eos_probability=0)
    return stack.add_runner(backend)


def run(stack: Stack, turns: int) -> None:
    """Runs turns of 10 ms, in which each runner executes a plan."""
    for _ in range(turns):
        stack.whole_turn(*list(stack.runners.runners), turn_s=0.01, most_plans=1)


def check(stack: Stack) -> None:
    """Checks that every answer is right and complete, and that nothing is held any more."""
    for request in stack.requests.values():
        for index, stream in enumerate(request.streams):
            assert stream.tokens == request.expected(index, 0.0)
            assert stream.end is not None
    stack.assert_clean()
