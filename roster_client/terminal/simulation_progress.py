"""Progress of `roster simulate` on standard error: a bar for a terminal, a line every ten seconds otherwise."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from roster_common.shown_bar import ShownBar

LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""


class SimulationProgress(ShownBar):
    """Shows the progress of one simulation after another, and a line of results as each ends."""

    def __init__(self, console: Console, names: list[str]) -> None:
        """`names`: of the policies, in order."""
        self._console = console
        self._names = names
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        # Redrawn by `advance` only: a thread that draws would take time from the engine that is measured.
        bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
        super().__init__(bar if console.is_terminal else None)
        self._task: TaskID | None = None
        self._name = ""
        self._begin_s = self._told_s = 0.0

    def begin(self, name: str) -> None:
        """Begins the simulation of a policy."""
        self._name = name
        self._begin_s = self._told_s = time.monotonic()
        number = f" ({self._names.index(name) + 1} of {len(self._names)})" if len(self._names) > 1 else ""
        if self._bar is not None:
            self._task = self._bar.add_task(f"{name}{number}", total=1.0)
            self._bar.refresh()

    def advance(self, share: float) -> None:
        """Shows that this share of the simulation is done, 0 to 1."""
        if self._bar is not None:
            if self._task is not None:
                self._bar.update(self._task, completed=share, refresh=True)
            return
        now_s = time.monotonic()
        if now_s - self._told_s >= LINE_S:
            self._told_s = now_s
            left_s = (now_s - self._begin_s) * (1 - share) / max(share, 1e-3)
            self._print(f"{self._name}: {share:.0%}, about {left_s:.0f} s left")

    def end(self, result: str) -> None:
        """Ends the simulation; prints its result if there are several."""
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
        if len(self._names) > 1:
            self._print(f"{self._name}: {result}, simulated in {time.monotonic() - self._begin_s:.0f} s")

    def _print(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
