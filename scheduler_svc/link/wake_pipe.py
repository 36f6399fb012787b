"""Ends the engine's wait from another thread."""

from __future__ import annotations

import os
from contextlib import suppress


class WakePipe:
    """A pipe whose `reader` is readable between `wake`, in any thread, and `drain`, in the thread that waits."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        """Wakes the waiting thread. Thread-safe."""
        with suppress(BlockingIOError):  # full of earlier calls, which wake the thread anyway
            os.write(self._writer, b"!")

    def drain(self) -> None:
        """Consumes the wake-ups. Called by the thread that waits."""
        with suppress(BlockingIOError):
            os.read(self.reader, 4096)

    def close(self) -> None:
        """Closes the pipe. No thread may wait or call `wake` any more."""
        os.close(self.reader)
        os.close(self._writer)
