"""One rank's share of the hash backend's numbers: shares of all ranks add up to the number, modulo 2^64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runner_svc.interface.ranks import Communicator

_BITS = 64


class HashShares:
    """Splits numbers by their bits, of which rank r of G has the r-th G-th."""

    def __init__(self, ranks: Communicator | None) -> None:
        """`ranks`: None has one share, the number."""
        self._ranks = ranks
        if ranks is not None:
            shard = ranks.shard
            first, end = (_BITS * rank // shard.size for rank in (shard.rank, shard.rank + 1))
            self._bits = np.uint64((1 << end) - (1 << first))

    def own(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns this rank's shares of `values`."""
        return values if self._ranks is None else values & self._bits

    def summed(self, shares: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the sums of all ranks' `shares` [L]. Raises RankLost. Ranks call it for the same rows."""
        if self._ranks is None or not len(shares):
            return shares
        import torch  # only for several ranks: the hash backend alone starts without it

        reduced = self._ranks.all_reduce(torch.from_numpy(shares.view(np.int64)))
        return reduced.numpy().view(np.uint64)
