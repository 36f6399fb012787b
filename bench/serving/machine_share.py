"""Measurement of the processors' time that other programs used during a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import psutil

QUIET = 0.05
"""Share below which a machine counts as quiet."""


@dataclass(slots=True)
class OthersShare:
    """Context manager around a measurement by this process and its children; `share` is set afterwards.

    The share is the part of all processors' time that was neither idle nor used by this process and its children. Time
    that the host took from a virtual machine counts as used by others.
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
        """Note for a report, "" for a quiet machine."""
        if self.share <= QUIET:
            return ""
        return (
            f"Other programs took {self.share:.0%} of the processors' time during the run: the machine was not quiet."
        )


def _times() -> tuple[float, float, float]:
    """Returns seconds so far: of all processors, of these not idle, of this process and its (also ended) children."""
    machine = psutil.cpu_times()
    total = sum(getattr(machine, name) for name in machine._fields if not name.startswith("guest"))
    here = psutil.Process()
    own = 0.0
    for process in (here, *here.children(recursive=True)):
        try:
            own += sum(process.cpu_times()[:4])  # user, system, and both of children that have ended
        except psutil.NoSuchProcess:
            continue  # it just ended, and its parent has its time
    return total, total - machine.idle - getattr(machine, "iowait", 0.0), own
