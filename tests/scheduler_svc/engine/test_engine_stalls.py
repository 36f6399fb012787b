"""Causes of stalls of all streams by milliseconds: garbage collection, and modules imported while serving."""

from __future__ import annotations

import sys

from runner_svc.backends.hash_backend import HashBackend
from tests.support.garbage import circles_left_by, in_own_process
from tests.support.in_process import Stack


def serving_stack() -> tuple[Stack, int]:
    stack = Stack()
    backend = HashBackend(num_slots=8, block_size=4, num_blocks=1000, max_step_tokens=64, eos_probability=0.0)
    session = stack.add_runner(backend)
    stack.step()
    return stack, session


def circles_left() -> list[int]:
    """Counts the cycles made by steps in which all decode, and by the following steps in which all requests end."""
    stack, session = serving_stack()
    for _ in range(8):
        stack.submit([5] * 6, 200)
    stack.advance(session, 20)
    left = [circles_left_by(lambda: stack.advance(session, 40))]
    assert not stack.engine.requests.idle
    left.append(circles_left_by(lambda: stack.advance(session, 200)))
    assert stack.engine.requests.idle
    return left


def test_steps_and_requests_that_end_leave_no_circles() -> None:
    assert in_own_process("circles_left()", __name__) == "[0, 0]"


def late_imports() -> list[str]:
    """Returns the modules imported only with the requests of a stack that was ready to serve."""
    stack, session = serving_stack()
    before = set(sys.modules)
    for index in range(8):
        stack.submit([5 + index] * 6, 60, n=1 + index % 2)
    stack.advance(session, 200)
    return sorted(set(sys.modules) - before)


def test_serving_imports_nothing() -> None:
    """In a separate process, which has imported only what serving needs."""
    assert in_own_process("late_imports()", __name__) == "[]"
