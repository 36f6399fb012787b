"""What a model's parts on several ranks ask of one another: which part is whose, and sums over all of them.

A *rank* is one process of a group that computes one model together (tensor parallelism). All ranks execute the same
plans in the same order, so each calls the same methods of its communicator in the same order, with equal shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # the hash backend's ranks share this without torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds: number `rank` of `size` equal ones."""

    rank: int = 0
    size: int = 1

    def part(self, whole: int) -> slice:
        """Returns this rank's part of `whole` rows, columns or heads. Raises ValueError unless `size` divides it."""
        each, rest = divmod(whole, self.size)
        if rest:
            raise ValueError(f"{whole} can't be divided among {self.size} ranks")
        return slice(self.rank * each, (self.rank + 1) * each)


@runtime_checkable
class Regrouping(Protocol):
    """A backend that does something when its group has formed."""

    def regroup(self) -> None:
        """Called on every rank each time the group has formed, before a session begins: forgets all KV.

        Ranks exchange equally here, whether their group has just lost them or they are new: what they measured or
        captured alone is kept, and what needs the others (a number of blocks that fits all, graphs that exchange) is
        done here.
        """


WHOLE = Shard()
"""The part of a runner that computes alone."""


class RankLost(RuntimeError):
    """Another rank of the group has died, hangs or gave up, so this step has no result; the group forms again."""


class Communicator(Protocol):
    """Exchanges tensors among the ranks of a group. Every method raises RankLost if the group is broken.

    Until the group has formed for the first time, nothing is exchanged, so that a rank that loads its weights may run
    the model to measure memory and times: `all_reduce` and `broadcast` return `x`, `all_gather` returns it `size`
    times, and `least` returns `value`.
    """

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' `x`, with the same bits on each rank. May overwrite and return `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns all ranks' `x` [rows, columns] side by side in order of ranks: [rows, size * columns]."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Returns rank 0's `x` on every rank. May overwrite and return `x`."""

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values, for example of the numbers of KV blocks that fit. The host waits."""
