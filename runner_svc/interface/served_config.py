"""What serving needs to know of a model, whichever decoder computes it."""

from __future__ import annotations

from typing import Protocol

from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import CachedHeads


class ServedConfig(CachedHeads, Protocol):
    """Sizes, limits and identity of a model; as `runner_svc.model.config.ModelConfig`."""

    @property
    def decoder(self) -> str:
        """Which decoder computes it: "roster" or "transformers"."""

    @property
    def architecture(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """Width of the states that the head reads."""

    @property
    def num_heads(self) -> int: ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Attention of each layer of the cache."""

    @property
    def context_length(self) -> int:
        """Most positions of one sequence."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def prefix_positions(self) -> int | None:
        """See `prefix_positions` of plan.proto's Model."""

    @property
    def rope_fingerprint(self) -> str | None:
        """What rotates queries and keys, as text to compare; None if only the weights' fingerprint covers it."""
