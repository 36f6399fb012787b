"""What the parts of a decoder on several ranks exchange: sums, and logits side by side. One rank exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.interface.ranks import Communicator
from runner_svc.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TotalSquares:
    """Adds up sums of squares [T, 1] of heads that the ranks share, each head once."""

    summed: Callable[[Tensor], Tensor]
    counts: bool
    """Whether this rank is the first that has these heads."""
    width: int
    """Of all heads together."""

    def __call__(self, squares: Tensor) -> Tensor:
        """Returns the sum over all heads, [T, 1]."""
        return self.summed(squares if self.counts else torch.zeros_like(squares))


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

    def total_squares(self, config: ModelConfig) -> tuple[TotalSquares | None, TotalSquares | None]:
        """Returns what adds up squares of queries, and of keys. `config`: the rank's."""
        if self._ranks is None:
            return None, None
        shard, replicas = config.shard, config.kv_replicas
        width, keys = config.num_heads * shard.size, config.num_kv_heads * shard.size // replicas
        is_first = shard.rank % replicas == 0
        return (
            TotalSquares(self.summed, True, width * config.head_dim),
            TotalSquares(self.summed, is_first, keys * config.head_dim),
        )

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
