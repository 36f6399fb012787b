"""Terms order schedulers: a term is a pair of a number and the random id of a process.

The number is one more than the greatest that any runner has reported, so that no clock is needed. A starting scheduler
may meet its predecessor's runners one after another. A greater term then shows only that it has not met all of them, so
it raises its own term. Once it has sent a plan, a greater term belongs to a successor and fences it. The ids decide
between two schedulers that start at once and reach the same number.

Schedulers before this feature used the nanosecond in which they met their first runner; numbers continue from it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

GREATEST_NUMBER = (1 << 63) - 1
"""Greatest valid number: messages with a greater one are ignored."""


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """Compared as a pair. Number 0: no scheduler has been met."""

    number: int = 0
    id: int = 0


class OwnTerm:
    """The term of this process."""

    def __init__(self) -> None:
        self._id = secrets.randbits(63) | 1
        self._settled = False
        self.term = Term()
        """Number 0 until the first runner is met."""

    def fix(self) -> None:
        """Fixes the term when the first plan is sent: from then on a greater term belongs to a successor."""
        self._settled = True

    def meet(self, theirs: Term) -> bool:
        """Handles a term reported by a runner. Returns False if it fences this process, whose term is otherwise
        greatest."""
        if self.term.number and theirs <= self.term:
            return True
        if self._settled:
            return False
        self.term = Term(max(self.term.number, theirs.number + 1), self._id)
        return True
