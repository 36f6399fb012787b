"""How far many requests have come: a bar on a terminal or in a notebook, otherwise a line now and then."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from roster_common.shown_bar import ShownBar

LINE_EVERY_S = 10.0
RATE_OVER_S = 10.0
"""The time over which the rates shown are means."""


class BulkProgress(ShownBar):
    """The progress of `total` requests on standard error, used in a `with`."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        """`done`: number of requests that were answered before."""
        self._console = console or Console(stderr=True)
        self._total = total
        self._done = done
        self._began = time.monotonic()
        self._printed_at = self._began
        self._samples = [(self._began, done, 0)]
        super().__init__(None)
        if self._console.is_terminal or self._console.is_jupyter:
            self._bar = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"), TimeRemainingColumn(),
                console=self._console, transient=True, refresh_per_second=4,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=total, completed=done, rates="")

    def update(self, done: int, tokens: int) -> None:
        """Shows the number of answered requests, and of tokens received since the start."""
        now = time.monotonic()
        self._samples.append((now, done, tokens))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_OVER_S:
            del self._samples[0]
        then, done_then, tokens_then = self._samples[0]
        seconds = max(now - then, 1e-3)
        rates = f"{(done - done_then) / seconds:,.1f} requests/s, {(tokens - tokens_then) / seconds:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rates=rates)
        elif now - self._printed_at >= LINE_EVERY_S:
            self._printed_at = now
            self._console.print(f"{done:,} of {self._total:,}, {rates}", highlight=False)
