"""The result of a plan without rows, held while copies are in flight: a scheduler sends such plans to hear of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from runner_svc.interface.step import StepOutput

_LOOK_S = 0.0001


def nothing() -> StepOutput:
    """Returns the output of no rows."""
    return StepOutput(np.zeros(0, np.uint8), np.zeros(0, np.uint8), np.zeros(0, np.int32))


class HeldStep:
    """Implements `PendingStep`; done once `has_news`, or once it is released because another plan is launched."""

    masked_rows = None

    def __init__(self, has_news: Callable[[], bool]) -> None:
        """`has_news` returns whether a copy is done that no result has named, or none is in flight."""
        self._has_news = has_news
        self._released = False
        self._error: Exception | None = None

    def release(self) -> None:
        """Ends the wait."""
        self._released = True

    def done(self) -> bool:
        try:
            return self._released or self._has_news()
        except Exception as error:  # of a copy: `wait` raises it, where errors become faults
            self._error = error
            return True

    def wait(self) -> StepOutput:
        while not self.done():
            time.sleep(_LOOK_S)
        if self._error is not None:
            raise self._error
        return nothing()
