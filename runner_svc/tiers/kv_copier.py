"""The interface between a runner and what copies KV blocks between its cache and its host pool.

Each direction is one in-order stream of tickets; a ticket is a number of blocks. Copies run while steps compute. The
caller knows which blocks may be used meanwhile (`runner_svc.batch.host_tickets`); a copier only moves bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Direction(Enum):
    """Where blocks are copied to."""

    OFFLOAD = "offload"
    """From the cache to the host pool."""
    LOAD = "load"
    """From the host pool to the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Tickets:
    """Tickets of one direction, the blocks of the first one first."""

    sources: NDArray[np.int32]  # [N]
    targets: NDArray[np.int32]  # [N]
    counts: NDArray[np.int32]  # [T] blocks of each ticket, >= 1; their sum is N

    @classmethod
    def none(cls) -> Tickets:
        """Returns no tickets."""
        return cls(_NONE, _NONE, _NONE)

    def split(self) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Returns sources and targets of each ticket."""
        ends = np.cumsum(self.counts).tolist()
        return [(self.sources[b:e], self.targets[b:e]) for b, e in pairwise([0, *ends])]


_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class DoneTicket:
    """A ticket whose blocks are all copied."""

    direction: Direction
    ordinal: int  # from 1, of its direction, since `restart`
    us: int  # from its first to its last copy, in microseconds
    is_lost: bool = False  # as tests have it: no result names it, so that what it wrote does not count


class KVCopier(Protocol):
    """Owns the host pool and copies whole blocks. Called by one thread: the one that starts steps."""

    num_host_blocks: int
    """Blocks of the host pool, with the ids 1 to this number."""
    block_bytes: int
    """Bytes of one block over all layers; 0 if nothing is stored."""
    block_ns: dict[Direction, int]
    """Time to copy one block, in nanoseconds, measured at start; 0: not measured."""
    on_done: Callable[[], None] | None
    """Called from any thread when a ticket is done; None if the caller polls. Set before the first `start`."""

    def start(self, offloads: Tickets, loads: Tickets) -> None:
        """Queues tickets behind the earlier ones of their direction.

        They begin once all steps launched so far have computed. Raises what the device raises.
        """

    def take_done(self) -> list[DoneTicket]:
        """Returns the tickets that are done and were not returned before, in order in each direction; cheap."""

    @property
    def in_flight(self) -> int:
        """Number of tickets that are not done yet."""

    def finish(self) -> None:
        """Waits until no ticket is in flight."""

    def restart(self) -> None:
        """Counts tickets from 1 again. No ticket is in flight; those not taken are dropped."""
