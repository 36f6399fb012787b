"""Tickets: copies of blocks in flight between a runner's cache and its host pool, one line per direction.

A runner copies the tickets of a line in order, so a confirmed ticket ends all before it. Those that no result has named
are *lost*: their content counts as never copied, and their blocks may be used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False)
class Ticket:
    """Blocks that are copied together."""

    sources: list[int]
    targets: list[int]
    number: int = field(default=0, init=False)
    """Its place in its line, from 1."""
    plan: int = field(default=0, init=False)
    """Number of the plan that starts it; 0 before that plan is made."""


class UnknownTicket(ValueError):
    """A result names a ticket that was never sent."""


T = TypeVar("T", bound=Ticket)


class TicketLine(Generic[T]):
    """Tickets of one direction in a session."""

    def __init__(self) -> None:
        self.unsent: list[T] = []
        """Tickets for the next plan, in order."""
        self.in_flight: deque[T] = deque()
        """Those that a plan has started, in order."""
        self._last = 0
        self._confirmed = 0

    def __len__(self) -> int:
        return len(self.unsent) + len(self.in_flight)

    def __iter__(self) -> Iterator[T]:
        yield from self.in_flight
        yield from self.unsent

    def add(self, ticket: T) -> None:
        """Adds a ticket, which the next plan starts."""
        self._last += 1
        ticket.number = self._last
        self.unsent.append(ticket)

    def send(self, plan: int) -> list[T]:
        """Returns the tickets that this plan starts."""
        sent, self.unsent = self.unsent, []
        for ticket in sent:
            ticket.plan = plan
        self.in_flight += sent
        return sent

    def confirm(self, numbers: Iterable[int]) -> tuple[list[T], list[T]]:
        """Returns the tickets with these numbers, now done, and those before the last of them that are lost.

        Numbers of tickets that have ended are ignored. Raises UnknownTicket, changing nothing, if one was never sent.
        """
        named = set(numbers)
        latest = max(named, default=0)
        if latest > self._last - len(self.unsent) or min(named, default=1) < 1:
            raise UnknownTicket(f"tickets {sorted(named)} of {self._last - len(self.unsent)}")
        done: list[T] = []
        lost: list[T] = []
        while self.in_flight and self.in_flight[0].number <= latest:
            ticket = self.in_flight.popleft()
            (done if ticket.number in named else lost).append(ticket)
        return done, lost

    def lose(self) -> list[T]:
        """Returns all tickets in flight, which are lost."""
        lost = list(self.in_flight)
        self.in_flight.clear()
        return lost
