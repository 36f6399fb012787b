"""Ends the engine's wait from another thread."""

from __future__ import annotations

import os
from contextlib import suppress


class WakePipe:
    """`reader` is readable between `wake`, in any thread, and `settle`, in the thread that waits."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        """Called by any thread."""
        with suppress(BlockingIOError):  # full of earlier calls: whoever waits is woken anyway
            os.write(self._writer, b"!")

    def drain(self) -> None:
        """Whoever waited is awake."""
        with suppress(BlockingIOError):
            os.read(self.reader, 4096)

    def close(self) -> None:
        """Nobody waits any more, and nobody may call `wake`."""
        os.close(self.reader)
        os.close(self._writer)
