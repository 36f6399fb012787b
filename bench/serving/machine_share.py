"""How much of the processors' time went to others while something was measured: what makes a machine not quiet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import psutil

QUIET = 0.05
"""Below this share a machine is called quiet."""


@dataclass(slots=True)
class OthersShare:
    """Use as `with`, around a measurement that this process and its children make; `share` is there afterwards.

    Of all processors' time: what neither this process, its children nor idling took. Time that the host took from a
    virtual machine is others' too.
    """

    share: float = 0.0
    _begin: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __enter__(self) -> Self:
        self._begin = _times()
        return self

    def __exit__(self, *_: object) -> None:
        total, busy, own = (after - before for after, before in zip(_times(), self._begin, strict=True))
        self.share = max(0.0, busy - own) / total if total > 0 else 0.0

    @property
    def note(self) -> str:
        """For a report; "" for a quiet machine."""
        if self.share <= QUIET:
            return ""
        return f"Other programs took {self.share:.0%} of the processors' time meanwhile: the machine was not quiet."


def _times() -> tuple[float, float, float]:
    """Seconds so far: of all processors, of these not idle, of this process and its children (dead ones included)."""
    machine = psutil.cpu_times()
    total = sum(getattr(machine, name) for name in machine._fields if not name.startswith("guest"))
    here = psutil.Process()
    own = 0.0
    for process in (here, *here.children(recursive=True)):
        try:
            own += sum(process.cpu_times()[:4])  # user, system, and both of children that have ended
        except psutil.NoSuchProcess:
            continue  # it ended just now: its parent has its time
    return total, total - machine.idle - getattr(machine, "iowait", 0.0), own
