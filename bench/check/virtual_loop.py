"""asyncio loop on a virtual clock: sleeping costs nothing, and a program does the same on every run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop whose clock jumps to the next timer instead of waiting. Without timers it waits for files and threads."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Returns the virtual time in seconds."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Moves the clock forward."""
        self._now_s += seconds


class _Selector(selectors.SelectSelector):
    """Selector based on `select`, not `epoll`, because a forked process would share epoll's state with its parent."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self._loop.jump(timeout)
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return super().get_map()
