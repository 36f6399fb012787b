"""Which ranks of a group are on one host, and which processes write and read the ring there.

A group's ranks are divided evenly among its nodes (hosts), in order: node n of N has the n-th G/N of G ranks. What rank
0 writes to its node's ring is read there by its launcher, too, and written to the rings of the other nodes by theirs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """Node `number` of `count`, of a group of `size` ranks."""

    size: int
    number: int = 0
    count: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks on each node."""
        return self.size // self.count

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return self.ranks_of(self.number)

    def ranks_of(self, number: int) -> range:
        """Returns the ranks of a node."""
        return range(number * self.num_ranks, (number + 1) * self.num_ranks)

    @property
    def others(self) -> list[int]:
        """The ranks of other nodes."""
        return [rank for rank in range(self.size) if rank not in self.ranks]

    @property
    def is_alone(self) -> bool:
        """Whether all ranks are on this node."""
        return self.count == 1

    # ------------------------------------------------------------------ the ring: place 0 writes, the others read

    @property
    def ring_places(self) -> int:
        """Number of places: one for each of the node's ranks, and one for its launcher if there are several nodes."""
        return self.num_ranks + (not self.is_alone)

    @property
    def launchers_place(self) -> int:
        """The launcher's place: behind rank 0 and the others of its node, or before the ranks of another one."""
        return 0 if self.number else self.num_ranks

    def ring_place(self, rank: int) -> int:
        """Returns the place of one of the node's ranks."""
        return rank - self.ranks.start + (self.number > 0)
