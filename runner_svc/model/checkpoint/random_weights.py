"""Random weights for a configuration, to benchmark a model without downloading it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from runner_svc.interface.progress import Progress
from runner_svc.interface.ranks import WHOLE, Shard
from runner_svc.model.checkpoint.cut_weights import cut_layer, padded_ends
from runner_svc.model.checkpoint.padded_widths import padded_mlp
from runner_svc.model.checkpoint.weights import check_on_load
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.description import LayerDescription, MlpDescription, NormKind, QkNorm
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.rank_parts import RankParts
from runner_svc.weights.expert_matrices import ExpertMatrices
from runner_svc.weights.expert_weights import ExpertWeights, SharedExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.model_weights import LayerWeights, MlpWeights, ModelWeights
from runner_svc.weights.on_load import NOTHING, OnLoad
from runner_svc.weights.plain_matrix import PlainMatrix

# As in transformers' initialisation; sums over a layer stay within the range of 16-bit types.
_SCALE = 0.02


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    seed: int = 0,
    on_load: OnLoad = NOTHING,
    shard: Shard = WHOLE,
) -> ModelWeights:
    """Returns normally distributed matrices, norms of one and biases of zero; layers are created on iteration.

    `on_load` quantizes them, a layer at a time. A rank of several makes each layer as a whole and keeps its part, so
    that the group has the numbers of a single one. Raises UnsupportedModel for a model that is quantized already, or
    that can't be divided, and as `check_on_load`.
    """
    if config.quantization is not None:
        raise UnsupportedModel(
            f"The model is quantized ({config.quantization.method}), and random weights are plain before they are "
            "quantized: remove 'quantization_config' from its config.json, and set quantization."
        )
    check_on_load(config, on_load)
    make, parts = _Maker(config, dtype, device, seed), RankParts(config, shard)
    parts.local()

    def layers() -> Iterator[LayerWeights]:
        for index, described in enumerate(config.layers):
            own = cut_layer(make.layer(described).mapped(on_load.layer_matrix), described, parts, dtype)
            yield replace(own, mlp=padded_mlp(own.mlp, described.mlp, parts, dtype))
            progress("making weights up", (index + 1) / config.num_layers)

    embeddings = make.matrix(config.vocab_size, config.hidden_size)
    head = embeddings if config.tied_embeddings else make.matrix(config.vocab_size, config.hidden_size)
    if not parts.is_whole:
        own = embeddings[parts.vocabulary].clone()
        head = own if head is embeddings else head[parts.vocabulary].clone()
        embeddings = own
    embeddings, of_head = padded_ends(embeddings, PlainMatrix(head), parts)
    has_positions = config.model.position_offset is not None
    return ModelWeights(
        embeddings=embeddings,
        head=LinearWeights(on_load.head_matrix(of_head)),
        norm=make.ones(config.hidden_size, config.norm),
        layers=layers(),
        positions=make.matrix(config.context_length, config.hidden_size) if has_positions else None,
    )


class _Maker:
    """Makes the tensors of one model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, *sizes: int) -> Tensor:
        empty = torch.empty(*sizes, dtype=self._dtype, device=self._device)
        return empty.normal_(0.0, _SCALE, generator=self._generator)

    def bias(self, *sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=self._dtype, device=self._device)

    def linear(self, rows: int, columns: int, has_bias: bool) -> LinearWeights:
        return LinearWeights.plain(self.matrix(rows, columns), self.bias(rows) if has_bias else None)

    def ones(self, size: int, kind: NormKind = NormKind.RMS) -> Tensor:
        weights = torch.full((size,), float(kind is not NormKind.RMS_PLUS_ONE), dtype=self._dtype, device=self._device)
        return torch.stack((weights, torch.zeros_like(weights))) if kind is NormKind.LAYER else weights

    def layer(self, described: LayerDescription) -> LayerWeights:
        config = self._config
        hidden, query_width = config.hidden_size, config.num_heads * config.head_dim
        qk_norms = _qk_norm_sizes(config, described)
        qk_kind = described.norm if described.qk_norm is QkNorm.HEAD else NormKind.RMS
        norm, mlp = self.ones(hidden, described.norm), described.mlp
        return LayerWeights(
            attention_norm=norm if described.pre_norms else None,
            attention_post_norm=norm if described.post_norms else None,
            q_norm=self.ones(qk_norms[0], qk_kind) if qk_norms else None,
            k_norm=self.ones(qk_norms[1], qk_kind) if qk_norms else None,
            qkv=self.linear(query_width + 2 * config.num_kv_heads * config.head_dim, hidden, described.qkv_bias),
            output=self.linear(hidden, query_width, described.output_bias),
            mlp_norm=norm if described.pre_norms and not described.parallel else None,
            mlp_post_norm=norm if described.post_norms else None,
            mlp=self.experts(mlp) if isinstance(mlp, ExpertsConfig) else self.mlp(mlp),
            sinks=torch.zeros(config.num_heads, device=self._device) if described.sinks else None,
        )

    def mlp(self, described: MlpDescription) -> MlpWeights:
        hidden = self._config.hidden_size
        return MlpWeights(
            gate_up=self.linear((1 + described.gated) * described.width, hidden, described.bias),
            down=self.linear(hidden, described.width, described.bias),
        )

    def experts(self, described: ExpertsConfig) -> ExpertWeights:
        count, width, hidden = described.num_experts, described.width, self._config.hidden_size
        shared = None
        if described.shared_width is not None:
            inner = self.mlp(MlpDescription(described.shared_width, described.activation))
            gate = self.matrix(1, hidden) if described.shared_gate else None
            shared = SharedExpertWeights(inner.gate_up, inner.down, gate)
        return ExpertWeights(
            router=self.linear(count, hidden, described.bias),
            gate_up=ExpertMatrices.plain(self.matrix(count, 2 * width, hidden)),
            gate_up_bias=self.bias(count, 2 * width) if described.bias else None,
            down=ExpertMatrices.plain(self.matrix(count, hidden, width)),
            down_bias=self.bias(count, hidden) if described.bias else None,
            shared=shared,
            corrections=torch.zeros(count, device=self._device) if described.router.is_corrected else None,
        )


def _qk_norm_sizes(config: ModelConfig, described: LayerDescription) -> tuple[int, int] | None:
    """Returns the weights of the queries' norm and of the keys'."""
    if described.qk_norm is QkNorm.NONE:
        return None
    if described.qk_norm is QkNorm.HEAD:
        return config.head_dim, config.head_dim
    return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
