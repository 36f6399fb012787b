"""Random weights for a configuration, to benchmark a model without downloading it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runner_svc.interface.progress import Progress
from runner_svc.model.config import ModelConfig
from runner_svc.model.weights import LayerWeights, ModelWeights

# As in transformers' initialisation; sums over a layer stay within the range of 16-bit types.
_SCALE = 0.02


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress, seed: int = 0
) -> ModelWeights:
    """Returns normally distributed matrices, norms of one and biases of zero; layers are created on iteration."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0.0, _SCALE, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def bias(size: int, wanted: bool) -> Tensor | None:
        return torch.zeros(size, dtype=dtype, device=device) if wanted else None

    hidden, inner = config.hidden_size, config.intermediate_size
    query_width = config.num_heads * config.head_dim
    qkv_width = query_width + 2 * config.num_kv_heads * config.head_dim

    def layers() -> Iterator[LayerWeights]:
        for index in range(config.num_layers):
            yield LayerWeights(
                attention_norm=ones(hidden),
                q_norm=ones(config.head_dim) if config.qk_norm else None,
                k_norm=ones(config.head_dim) if config.qk_norm else None,
                qkv=matrix(qkv_width, hidden),
                qkv_bias=bias(qkv_width, config.qkv_bias),
                output=matrix(hidden, query_width),
                output_bias=bias(hidden, config.output_bias),
                mlp_norm=ones(hidden),
                gate_up=matrix(2 * inner, hidden),
                gate_up_bias=bias(2 * inner, config.mlp_bias),
                down=matrix(hidden, inner),
                down_bias=bias(hidden, config.mlp_bias),
            )
            progress("making weights up", (index + 1) / config.num_layers)

    embeddings = matrix(config.vocab_size, hidden)
    head = embeddings if config.tied_embeddings else matrix(config.vocab_size, hidden)
    return ModelWeights(embeddings=embeddings, head=head, norm=ones(hidden), layers=layers())
