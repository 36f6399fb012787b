"""What a backend asks of a decoder: `Decoder` here, `TransformersDecoder` for other architectures."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runner_svc.decoder.cpu_decoder import DecoderInputs, LayerAttention
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.served_config import ServedConfig


class ServedDecoder(Protocol):
    """Computes steps in two calls: only the rows that sample and the prompt positions that are scored need logits.

    `logits` is `head` of `final_states`.
    """

    @property
    def config(self) -> ServedConfig: ...

    @property
    def embeddings(self) -> Tensor:
        """The table of token embeddings, [at least vocab_size, hidden_size]; a rank's rows in a group of several."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [..., hidden_size] of tokens, int64 [...]. All ranks of a group call it together."""

    def forward(self, inputs: DecoderInputs, cache: KVCache, attention: LayerAttention) -> Tensor:
        """Writes the KV of all positions; returns the hidden states [T, hidden_size] that `logits` reads."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] of L of these positions, [L, hidden_size]; L may be 0."""

    def final_states(self, hidden: Tensor) -> Tensor:
        """Returns what the head reads of L of these positions, after the final norm, [L, hidden_size]."""

    def head(self, states: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] of L final states, [L, hidden_size]; L may be 0."""
