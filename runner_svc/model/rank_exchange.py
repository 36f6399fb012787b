"""What the parts of a decoder on several ranks exchange: sums, and logits side by side. One rank exchanges nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.interface.ranks import Communicator


class Exchange:
    """The exchanges of one rank's decoder."""

    def __init__(self, ranks: Communicator | None, *, in_order: bool = False) -> None:
        """None: there is one rank.

        `in_order`: sums are made in the order of the ranks, so that their bits do not depend on the number of rows; a
        ring of ranks begins at a place that depends on it.
        """
        self._ranks = ranks if ranks is not None and ranks.shard.size > 1 else None
        self._in_order = in_order

    @property
    def is_shared(self) -> bool:
        """Whether there are several ranks."""
        return self._ranks is not None

    def summed(self, x: Tensor) -> Tensor:
        """Returns the sum of the ranks' x, which may be overwritten."""
        if self._ranks is None:
            return x
        if not self._in_order:
            return self._ranks.all_reduce(x)
        total, *others = self._ranks.all_gather(x).chunk(self._ranks.shard.size, dim=1)
        for other in others:
            total = total + other
        return total

    def looked_up(self, tokens: Tensor, table: Tensor, ids: slice) -> Tensor:
        """Returns the embeddings of tokens [...]; `table` has those of `ids`."""
        if self._ranks is None:
            return functional.embedding(tokens, table)
        is_own = (tokens >= ids.start) & (tokens < ids.stop)
        rows = functional.embedding(torch.where(is_own, tokens - ids.start, 0), table)
        return self.summed(rows.masked_fill_(~is_own.unsqueeze(-1), 0))

    def side_by_side(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Returns the whole vocabulary's logits, [L, vocab_size], of the ranks' parts."""
        if self._ranks is None:
            return logits
        if not len(logits):  # which all ranks know
            return logits.new_zeros(0, vocab_size)
        return self._ranks.all_gather(logits)[:, :vocab_size].contiguous()
