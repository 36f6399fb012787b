"""Tokens that end the step that computes them, for tests."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from typing import Literal


class BrokenDevice(RuntimeError):
    """Simulates a device that can't be used any more."""


@dataclass(frozen=True, slots=True)
class Poison:
    """A token that ends the step that computes it, for tests of isolation and recovery."""

    token: int
    effect: Literal["kill", "hang", "error", "broken"]
    """SIGKILL for this process, an endless step, a backend error, or an error that breaks the backend."""

    def end_step(self) -> None:
        """Applies the effect; does not return."""
        if self.effect == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.effect == "hang":
            threading.Event().wait()
        raise (BrokenDevice if self.effect == "broken" else RuntimeError)("this token is poison")
