"""Progress of `roster simulate` on standard error: a bar for a terminal, a line every ten seconds otherwise."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""


class SimulationProgress:
    """Shows the progress of one simulation after another, and a line of results as each ends."""

    def __init__(self, console: Console, names: list[str]) -> None:
        """`names`: of the policies, in order."""
        self._console = console
        self._names = names
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        # Redrawn by `advance` only: a thread that draws would take time from the engine that is measured.
        self._bars = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._task: TaskID | None = None
        self._name = ""
        self._begin_s = self._told_s = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def begin(self, name: str) -> None:
        """Begins the simulation of a policy."""
        self._name = name
        self._begin_s = self._told_s = time.monotonic()
        number = f" ({self._names.index(name) + 1} of {len(self._names)})" if len(self._names) > 1 else ""
        self._task = self._bars.add_task(f"{name}{number}", total=1.0)
        self._bars.refresh()

    def advance(self, share: float) -> None:
        """Shows that this share of the simulation is done, 0 to 1."""
        if self._console.is_terminal:
            if self._task is not None:
                self._bars.update(self._task, completed=share, refresh=True)
            return
        now_s = time.monotonic()
        if now_s - self._told_s >= LINE_S:
            self._told_s = now_s
            left_s = (now_s - self._begin_s) * (1 - share) / max(share, 1e-3)
            self._print(f"{self._name}: {share:.0%}, about {left_s:.0f} s left")

    def end(self, result: str) -> None:
        """Ends the simulation; prints its result if there are several."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        if len(self._names) > 1:
            self._print(f"{self._name}: {result}, simulated in {time.monotonic() - self._begin_s:.0f} s")

    def _print(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
