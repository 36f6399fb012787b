"""The interface of transports that copy granted blocks from another runner's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class PullFailed(Exception):
    """A pull has ended without all of its blocks; the message says why, as a sentence."""


class Unreachable(PullFailed):
    """The transport does not reach the source, of which nothing was read: another one may."""


@dataclass(frozen=True, slots=True, eq=False)
class PullOrder:
    """One pull; `sources` and `targets` are int32 [N]."""

    key: bytes
    endpoint: str
    """Where the source listens."""
    source_key: bytes
    """The source's public CURVE key, Z85; empty without CURVE."""
    memory: str
    """Where the source's memory is mapped; "": nowhere."""
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]


class Transport(Protocol):
    """One way to read another runner's blocks."""

    name: str

    def pull(self, order: PullOrder, is_cancelled: Callable[[], bool]) -> int:
        """Copies the blocks and returns the number of bytes. Nothing is written after it has returned or raised.

        Raises PullFailed, Unreachable, and PullFailed soon after `is_cancelled()` has become true.
        """
