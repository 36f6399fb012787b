"""How many requests are in flight: as many as the server admits, up to a limit."""

from __future__ import annotations

import asyncio
from collections import deque

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
GROWTH = 0.25
"""Places that an answer adds after refusals have removed some, so that a server that has more room is filled again."""


class Window:
    """Places for requests in flight, given to callers in the order in which they ask.

    A refusal leaves as many places as there are requests in flight besides it, and holds the next ones back until the
    time that the server gave, or until an answer has made room. Answers add places again, up to `most`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places = float(most)
        self._in_flight = 0
        self._pause_s = FIRST_PAUSE_S
        self._held: asyncio.TimerHandle | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Takes a place, waiting until one is free."""
        if not self._waiting and self._has_room():
            self._in_flight += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            elif turn in self._waiting:  # `_let_in` may have dropped it since
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        """Frees a place."""
        self._in_flight -= 1
        self._let_in()

    def answered(self) -> None:
        """Notes that a request in flight was answered: the server has room for another."""
        self._places = min(self._most, self._places + GROWTH)
        self._pause_s = FIRST_PAUSE_S
        self._resume()

    def refused(self, retry_after_s: float | None) -> None:
        """Notes that the server has no room for a request in flight before this many seconds."""
        self._places = max(1.0, min(self._places, self._in_flight - 1))
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.hold(retry_after_s or pause_s)

    def hold(self, seconds: float) -> None:
        """Gives no places for this time, or until a request in flight is answered."""
        if self._held is not None:
            self._held.cancel()
        self._held = asyncio.get_running_loop().call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._held is not None:
            self._held.cancel()
            self._held = None
            self._let_in()

    def _has_room(self) -> bool:
        return self._held is None and self._in_flight < int(self._places)

    def _let_in(self) -> None:
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)
