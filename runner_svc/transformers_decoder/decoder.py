"""A causal language model of transformers as a decoder over ragged batches: its forward, our cache and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.cpu_decoder import DecoderInputs, LayerAttention
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.config import token_ids
from runner_svc.model.errors import UnsupportedModel
from runner_svc.transformers_decoder.attention_trace import TracedCall, trace
from runner_svc.transformers_decoder.context import context_length
from runner_svc.transformers_decoder.own_cache import refuse_narrower_cache
from runner_svc.transformers_decoder.paged_attention import PagedStep
from runner_svc.transformers_decoder.row_rope import RowLengths, compute_by_row
from runner_svc.transformers_decoder.split_model import SplitModel
from runner_svc.transformers_decoder.step_attention import NAME, register, serving


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """Implements `runner_svc.interface.served_config.ServedConfig`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int  # of the cache: attention calls of a pass
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of the cache: the widest key or value
    attention_layers: tuple[AttentionLayer, ...]
    context_length: int
    eos_token_ids: tuple[int, ...]
    prefix_positions: int | None = None

    @property
    def decoder(self) -> str:
        """See `ServedConfig`."""
        return "transformers"

    @property
    def rope_fingerprint(self) -> str | None:
        """See `ServedConfig`: config.json, which the weights' fingerprint covers, says it all."""
        return None

    @classmethod
    def of(
        cls, model: Any, calls: list[TracedCall], vocab_size: int, hidden_size: int, prefix_positions: int | None
    ) -> TransformersConfig:
        """Reads the sizes off a model and its attention calls. Raises UnsupportedModel if one is not given."""
        text = model.config.get_text_config()
        return cls(
            architecture=type(model).__name__,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=len(calls),
            num_heads=calls[0].num_heads,
            num_kv_heads=max(call.num_kv_heads for call in calls),
            head_dim=max(max(call.key_dim, call.value_dim) for call in calls),
            attention_layers=tuple(call.layer for call in calls),
            context_length=context_length(model),
            eos_token_ids=token_ids(getattr(text, "eos_token_id", None)),
            prefix_positions=prefix_positions,
        )


class TransformersDecoder:
    """Computes steps with a model of transformers, in evaluation mode, whose attention is ours.

    Implements `runner_svc.decoder.served_decoder.ServedDecoder`.
    """

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModel for a model whose attention can't be paged."""
        register()
        name = type(model).__name__
        if not getattr(type(model), "_supports_attention_backend", False):
            raise UnsupportedModel(f"{name} does not let its attention be replaced.")
        model.set_attn_implementation(NAME)
        self.model = model
        self._split = SplitModel(model)
        self._rows = RowLengths()
        prefix_positions = compute_by_row(model, self._rows)
        try:
            self.calls = trace(self._hidden, model.device)
            """Attention calls of a pass, in order."""
            vocab_size = self._vocab_size()
            hidden_size = self._split.example.shape[-1]
            refuse_narrower_cache(model, self.calls)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{name} is not served: {error}") from error
        except Exception as error:  # whatever a class says about arguments that it misses, or has too many
            reason = " ".join(str(error).split())[:300]
            raise UnsupportedModel(f"{name} does not run on tokens and positions alone: {reason}") from error
        self.config = TransformersConfig.of(model, self.calls, vocab_size, hidden_size, prefix_positions)

    def embed(self, tokens: Tensor) -> Tensor:
        """See `ServedDecoder`."""
        return functional.embedding(tokens, self.model.get_input_embeddings().weight)

    def forward(self, inputs: DecoderInputs, cache: KVCache, attention: LayerAttention) -> Tensor:
        """Writes the KV of all positions; returns the hidden states [T, hidden_size] that `logits` reads."""
        step = PagedStep(self.calls, cache, inputs.slot_mapping, attention)
        with serving(step):
            hidden = self.hidden(inputs.tokens, inputs.positions, inputs.prompt_lens)
        step.finish()
        return hidden

    def hidden(self, tokens: Tensor, positions: Tensor, prompt_lens: Tensor | None) -> Tensor:
        """Returns the hidden states [T, hidden_size] of int64 [T] inputs, with the attention that is being served.

        `prompt_lens` is None for a model whose frequencies do not depend on them.
        """
        self._rows.lengths = None if prompt_lens is None else torch.maximum(positions + 1, prompt_lens)
        try:
            return self._hidden(tokens, positions)
        finally:
            self._rows.lengths = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 [L, vocab_size] of L of these positions, [L, hidden_size]; L may be 0."""
        if not len(hidden):
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self._split.logits(hidden).float()

    def final_states(self, hidden: Tensor) -> Tensor:
        """See `ServedDecoder`: base models return them."""
        return hidden

    def head(self, states: Tensor) -> Tensor:
        """See `ServedDecoder`."""
        return self.logits(states)

    def _vocab_size(self) -> int:
        with torch.inference_mode():
            example = self._split.example
            size = self._split.logits(torch.zeros_like(example[:1])).shape[-1]
        known = self.model.get_input_embeddings().weight.shape[0]
        if size > known:
            raise UnsupportedModel(f"it has logits of {size} tokens, but embeddings of {known} only.")
        return size

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        arguments = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False}
        return self._split.hidden(arguments)
