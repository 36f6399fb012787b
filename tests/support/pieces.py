"""Answers that arrive in pieces.

How many messages an answer takes depends on the machine's load: tokens that wait for a busy process leave in one
message. A test that wants pieces therefore asks again until an answer came in enough of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sized
from typing import TypeVar

Answer = TypeVar("Answer")
_TRIES = 10


def in_pieces(ask: Callable[[], Answer], pieces: Callable[[Answer], Sized], least: int = 2) -> Answer:
    """Returns the first of ten answers that has at least `least` pieces; fails if none has."""
    for _ in range(_TRIES):
        answer = ask()
        if len(pieces(answer)) >= least:
            return answer
    raise AssertionError(f"{_TRIES} answers in a row came in fewer than {least} pieces")


async def in_pieces_async(
    ask: Callable[[], Awaitable[Answer]], pieces: Callable[[Answer], Sized], least: int = 2
) -> Answer:
    """Does what `in_pieces` does for a coroutine."""
    for _ in range(_TRIES):
        answer = await ask()
        if len(pieces(answer)) >= least:
            return answer
    raise AssertionError(f"{_TRIES} answers in a row came in fewer than {least} pieces")
