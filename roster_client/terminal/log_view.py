"""Shows the lines of child services on a console, each with its service's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

_COLOURS = {"scheduler": "cyan", "runner": "magenta"}
_NAME_COLUMNS = max(map(len, _COLOURS))


class LogView:
    """Prints lines as they come unless `muted`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.muted = False

    def line(self, name: str, text: str) -> None:
        """One line of a service, which may hold colour codes of its own."""
        if not self.muted:
            prefix = Text(f"{name:>{_NAME_COLUMNS}} │ ", style=_COLOURS.get(name, ""))
            self._console.print(prefix + Text.from_ansi(text), highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says what is awaited; on a terminal it stays below the lines until it is there."""
        if not self._console.is_terminal:
            self._console.print(what, highlight=False)
            yield
            return
        with self._console.status(what, refresh_per_second=4):
            yield
