"""Shows the progress of loading: a bar on a terminal, otherwise log lines."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import structlog

from roster_common.shown_bar import ShownBar

if TYPE_CHECKING:
    from rich.progress import Progress

_LINE_INTERVAL_S = 2.0
_LONGEST_SILENCE_S = 30.0
"""Seconds after which less than a percent is reported too."""

log = structlog.get_logger()


class LoadingProgress(ShownBar):
    """A `Progress` callback; use it as a context manager."""

    def __init__(self) -> None:
        super().__init__(_bar() if sys.stderr.isatty() else None)
        self._phase: str | None = None
        self._told_at = 0.0
        self._told_share = 0.0

    def __call__(self, phase: str, share: float) -> None:
        """Reports `share`, 0 to 1, of an operation."""
        if self._bar is not None:
            if phase != self._phase:
                self._bar.add_task(phase, total=1.0)
            self._bar.update(self._bar.task_ids[-1], completed=share)
        elif phase != self._phase or share >= 1 or self._is_due(share):
            log.info(phase, percent=round(100 * share))
            self._told_at, self._told_share = time.monotonic(), share
        self._phase = phase

    def _is_due(self, share: float) -> bool:
        """Returns whether a line is worth reading: a long operation has one for each percent, a stalled one none."""
        waited_s = time.monotonic() - self._told_at
        step = 0.01 if waited_s < _LONGEST_SILENCE_S else 0.0
        return waited_s > _LINE_INTERVAL_S and share - self._told_share > step


def _bar() -> Progress:
    """Makes the bar. rich is imported only here, because a service rarely has a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))
