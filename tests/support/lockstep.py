"""Drives a `Stack` turn by turn: the engine steps, then every runner executes one plan and delivers its result."""

from __future__ import annotations

from tests.support.in_process import Stack

MOST_TURNS = 3000


def advance(stack: Stack, turns: int = 1, turn_s: float = 0.0) -> None:
    """Runs turns of `turn_s` seconds each."""
    for _ in range(turns):
        stack.whole_turn(*stack.runners.runners, turn_s=turn_s, most_plans=1)


def advance_until_idle(stack: Stack) -> None:
    """Runs turns until no request is live and nothing is in flight. Raises AssertionError after MOST_TURNS."""
    for _ in range(MOST_TURNS):
        advance(stack)
        if stack.engine.requests.idle and not stack.front.commands and not stack.runners.events:
            stack.step()
            return
    raise AssertionError("never idle")
