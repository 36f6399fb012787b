"""Random weights for a configuration, to benchmark a model without downloading it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runner_svc.interface.progress import Progress
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.description import LayerDescription, NormKind, QkNorm
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.model_weights import LayerWeights, MlpWeights, ModelWeights

# As in transformers' initialisation; sums over a layer stay within the range of 16-bit types.
_SCALE = 0.02


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress, seed: int = 0
) -> ModelWeights:
    """Returns normally distributed matrices, norms of one and biases of zero; layers are created on iteration."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0.0, _SCALE, generator=generator)

    def linear(rows: int, columns: int, has_bias: bool) -> LinearWeights:
        return LinearWeights(matrix(rows, columns), torch.zeros(rows, dtype=dtype, device=device) if has_bias else None)

    def ones(size: int, kind: NormKind = NormKind.RMS) -> Tensor:
        weights = torch.full((size,), float(kind is not NormKind.RMS_PLUS_ONE), dtype=dtype, device=device)
        return torch.stack((weights, torch.zeros_like(weights))) if kind is NormKind.LAYER else weights

    def layer(described: LayerDescription) -> LayerWeights:
        qk_norms = _qk_norm_sizes(config, described)
        qk_kind = described.norm if described.qk_norm is QkNorm.HEAD else NormKind.RMS
        norm = ones(hidden, described.norm)
        return LayerWeights(
            attention_norm=norm if described.pre_norms else None,
            attention_post_norm=norm if described.post_norms else None,
            q_norm=ones(qk_norms[0], qk_kind) if qk_norms else None,
            k_norm=ones(qk_norms[1], qk_kind) if qk_norms else None,
            qkv=linear(query_width + 2 * config.num_kv_heads * config.head_dim, hidden, described.qkv_bias),
            output=linear(hidden, query_width, described.output_bias),
            mlp_norm=norm if described.pre_norms and not described.parallel else None,
            mlp_post_norm=norm if described.post_norms else None,
            mlp=MlpWeights(
                gate_up=linear((1 + described.mlp.gated) * described.mlp.width, hidden, described.mlp.bias),
                down=linear(hidden, described.mlp.width, described.mlp.bias),
            ),
        )

    hidden, query_width = config.hidden_size, config.num_heads * config.head_dim

    def layers() -> Iterator[LayerWeights]:
        for index, described in enumerate(config.layers):
            yield layer(described)
            progress("making weights up", (index + 1) / config.num_layers)

    embeddings = matrix(config.vocab_size, hidden)
    return ModelWeights(
        embeddings=embeddings,
        head=embeddings if config.tied_embeddings else matrix(config.vocab_size, hidden),
        norm=ones(hidden, config.norm),
        layers=layers(),
        positions=matrix(config.context_length, hidden) if config.model.position_offset is not None else None,
    )


def _qk_norm_sizes(config: ModelConfig, described: LayerDescription) -> tuple[int, int] | None:
    """Returns the weights of the queries' norm and of the keys'."""
    if described.qk_norm is QkNorm.NONE:
        return None
    if described.qk_norm is QkNorm.HEAD:
        return config.head_dim, config.head_dim
    return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
