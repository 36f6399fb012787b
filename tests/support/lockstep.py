"""A `Stack` driven turn by turn: the engine steps, then every runner executes one plan and delivers its result."""

from __future__ import annotations

from tests.support.in_process import Stack

MOST_TURNS = 3000


def advance(stack: Stack, turns: int = 1) -> None:
    """So many turns."""
    for _ in range(turns):
        stack.step()
        for session in list(stack.runners.runners):
            stack.runners.execute(session)
            stack.runners.deliver(session)


def advance_until_idle(stack: Stack) -> None:
    """Turns until no request lives and nothing is on its way. Raises AssertionError if that does not come."""
    for _ in range(MOST_TURNS):
        advance(stack)
        if stack.engine.idle and not stack.front.commands and not stack.runners.events:
            stack.step()
            return
    raise AssertionError("never idle")
