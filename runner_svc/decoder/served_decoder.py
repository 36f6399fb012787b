"""What a backend asks of a decoder: `Decoder` here, `TransformersDecoder` for other architectures."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runner_svc.decoder.cpu_decoder import DecoderInputs, LayerAttention
from runner_svc.interface.kv_cache import KVCache
from runner_svc.interface.served_config import ServedConfig


class ServedDecoder(Protocol):
    """Computes steps in two calls: only the rows that sample and the prompt positions that are scored need logits.

    `logits` is `head` of `final_states`. The ranks of a group make each call but `final_states` together.
    """

    @property
    def config(self) -> ServedConfig: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings of tokens, [T, hidden_size] of int64 [T], before the model scales them."""

    def forward(self, inputs: DecoderInputs, cache: KVCache, attention: LayerAttention) -> Tensor:
        """Writes the KV of all positions; returns the hidden states [T, hidden_size] that `logits` reads."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] of L of these positions, [L, hidden_size]; L may be 0."""

    def final_states(self, hidden: Tensor) -> Tensor:
        """Returns what the head reads of L of these positions, after the final norm, [L, hidden_size]."""

    def head(self, states: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] of L final states, [L, hidden_size]; L may be 0."""
