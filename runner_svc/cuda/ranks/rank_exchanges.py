"""What a forward pass on one of several GPUs asks of the other ranks: sums of products, embeddings, logits.

Output and down products are sums over columns that are divided among the ranks, so each is followed by a sum over the
ranks, before the norm that adds it. Embeddings and head are divided by vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runner_svc.interface.layer_launchers import EmbedPartLauncher
from runner_svc.interface.ranks import Communicator, PeerCommunicator


class RankExchanges:
    """The exchanges of one rank's passes. Nothing waits for the device, so that they can be captured."""

    def __init__(self, ranks: Communicator, vocabulary: slice, embed: EmbedPartLauncher) -> None:
        """`vocabulary`: token ids of this rank's rows of embeddings and head; all ranks have as many."""
        self.ranks = ranks
        self._embed = embed
        self._begin: int = vocabulary.start
        self._columns: int = vocabulary.stop - vocabulary.start

    def add_up(self, x: Tensor) -> None:
        """Replaces x by the sum of all ranks' x."""
        total = self.ranks.all_reduce(x)
        if total is not x:
            x.copy_(total)

    def embed(self, stream: int, tokens: Tensor, embeddings: Tensor, out: Tensor) -> None:
        """Fills `out` [T, hidden_size] with the embeddings of tokens, int32 [T]; `embeddings` are this rank's."""
        self._embed(stream, tokens, embeddings, self._begin, out)
        self.add_up(out)

    def logits(self, multiply: Callable[[Tensor], None], out: Tensor) -> None:
        """Fills `out`, float32 [L, vocab_size]. `multiply` fills a tensor with the logits of this rank's rows."""
        own = torch.empty(len(out), self._columns, dtype=out.dtype, device=out.device)
        multiply(own)
        if isinstance(self.ranks, PeerCommunicator):
            self.ranks.gather_into(own, out)
        else:
            out.copy_(self.ranks.all_gather(own)[:, : out.shape[1]])
