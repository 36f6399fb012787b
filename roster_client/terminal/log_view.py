"""Prints the output of child services on a console, each line with its service's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

_COLOURS = {"scheduler": "cyan", "runner": "magenta", "gateway": "blue"}
_NAME_COLUMNS = max(map(len, _COLOURS))


class LogView:
    """Prints lines as they arrive unless `muted`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.muted = False

    def line(self, name: str, text: str) -> None:
        """Prints one line of a service, which may contain ANSI colour codes."""
        if not self.muted:
            prefix = Text(f"{name:>{_NAME_COLUMNS}} │ ", style=_COLOURS.get(name, ""))
            self._console.print(prefix + Text.from_ansi(text), highlight=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows what is awaited; on a terminal, below the lines until the context ends."""
        if not self._console.is_terminal:
            self._console.print(what, highlight=False)
            yield
            return
        with self._console.status(what, refresh_per_second=4):
            yield
