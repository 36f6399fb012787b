"""A progress bar that is on the screen within a `with`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress


class ShownBar:
    """Base of displays of progress. Where there is no terminal they have no bar, and print or log lines instead."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
