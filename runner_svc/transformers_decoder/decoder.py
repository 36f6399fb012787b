"""A causal language model of transformers as a decoder over ragged batches, with the paged cache and attention."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner_svc.decoder.cpu_decoder import DecoderInputs, LayerAttention
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.errors import UnsupportedModel
from runner_svc.transformers_decoder.attention_trace import TracedCall, trace
from runner_svc.transformers_decoder.paged_attention import PagedStep
from runner_svc.transformers_decoder.step_attention import NAME, register, serving


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """What a backend needs to know of a model: as `runner_svc.model.config.ModelConfig` where the names are alike."""

    architecture: str
    vocab_size: int
    num_layers: int  # of the cache: attention calls of a pass
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of the cache: the widest key or value
    attention_layers: tuple[AttentionLayer, ...]
    context_length: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: Any, calls: list[TracedCall]) -> TransformersConfig:
        """Reads the sizes off a model and its attention calls."""
        text = model.config.get_text_config()
        eos = text.eos_token_id
        return cls(
            architecture=type(model).__name__,
            vocab_size=model.get_output_embeddings().weight.shape[0],
            num_layers=len(calls),
            num_heads=calls[0].num_heads,
            num_kv_heads=calls[0].num_kv_heads,
            head_dim=max(max(call.key_dim, call.value_dim) for call in calls),
            attention_layers=tuple(call.layer for call in calls),
            context_length=text.max_position_embeddings,
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        )


class TransformersDecoder:
    """Computes steps with a model of transformers, in evaluation mode, whose attention is ours."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModel for a model whose attention can't be paged."""
        register()
        if not getattr(type(model), "_supports_attention_backend", False):
            raise UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced.")
        model.set_attn_implementation(NAME)
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        self._takes = parameters.keys()
        self._calls = list(trace(lambda tokens, positions: self._run(tokens, positions, None)))
        self.config = TransformersConfig.of(model, self._calls)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> TransformersDecoder:
        """Loads a checkpoint. Raises UnsupportedModel for a model that transformers can't load without remote code."""
        from transformers import AutoModelForCausalLM

        register()
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, trust_remote_code=False, local_files_only=True, use_safetensors=True
        )
        return cls(model.eval())

    def forward(self, inputs: DecoderInputs, cache: KVCache, attention: LayerAttention, wanted: Tensor) -> Tensor:
        """Writes the KV of all positions; returns float32 [L, vocab_size] of the `wanted` positions, int64 [L]."""
        step = PagedStep(self._calls, cache, inputs.slot_mapping, attention)
        with serving(step):
            logits = self._run(inputs.tokens[None], inputs.positions[None], wanted)
        step.finish()
        return logits.float()

    def _run(self, tokens: Tensor, positions: Tensor, wanted: Tensor | None) -> Tensor:
        """Returns the logits of the wanted positions, or of all."""
        arguments: dict[str, Any] = {"position_ids": positions}
        if wanted is not None and "logits_to_keep" in self._takes:
            arguments["logits_to_keep"] = wanted
        logits: Tensor = self._model(input_ids=tokens, use_cache=False, **arguments).logits[0]
        if wanted is not None and "logits_to_keep" not in self._takes:
            return logits[wanted]
        return logits
