"""Which scheduler is the later one: terms, pairs of a number and the random id of a process.

The number is one more than the greatest that any runner has told of, so that no clock is asked. A scheduler that starts
may meet its predecessor's runners one after another: a greater term than its own only shows then that it has not met
them all, and it raises its own. Once it has sent a plan, a greater term is a successor's, and fences it. Of two that
start at once and come to the same number the ids decide.

Schedulers before this feature took the nanosecond in which they met their first runner. Numbers go on from there.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

GREATEST_NUMBER = (1 << 63) - 1
"""A runner that tells of more is out of its mind."""


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """Compared as a pair. No number: no scheduler has been there."""

    number: int = 0
    id: int = 0


class OwnTerm:
    """The term of this process."""

    def __init__(self) -> None:
        self._id = secrets.randbits(63) | 1
        self._settled = False
        self.term = Term()
        """Without a number until the first runner is met."""

    def fix(self) -> None:
        """A plan is sent: from now on a greater term is a successor's."""
        self._settled = True

    def meet(self, theirs: Term) -> bool:
        """A runner tells of that term. False: this process is fenced by it; else its own is the greater one."""
        if self.term.number and theirs <= self.term:
            return True
        if self._settled:
            return False
        self.term = Term(max(self.term.number, theirs.number + 1), self._id)
        return True
