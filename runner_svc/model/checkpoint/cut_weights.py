"""Cuts whole layers into a rank's part: those whose matrices are quantized or made up as a whole.

What a checkpoint has in a format is read in parts instead, by the `LayerReader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.model.families.description import LayerDescription, MlpDescription, QkNorm
from runner_svc.model.rank_parts import RankParts
from runner_svc.weights.cutting import part_of
from runner_svc.weights.expert_matrices import ExpertMatrices
from runner_svc.weights.expert_weights import ExpertWeights, SharedExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix, joined
from runner_svc.weights.matrix_part import MatrixPart
from runner_svc.weights.model_weights import LayerWeights, MlpWeights
from runner_svc.weights.plain_matrix import PlainMatrix


def cut_layer(layer: LayerWeights, described: LayerDescription, parts: RankParts, dtype: torch.dtype) -> LayerWeights:
    """Returns the part of a whole layer. `described`: the whole one; `dtype`: see `part_of`."""
    if parts.is_whole:
        return layer
    cutter = _Cutter(parts, dtype)
    (qkv,) = parts.qkv(modules=1)
    return replace(
        layer,
        q_norm=cutter.head_norm(layer.q_norm, described, parts.heads),
        k_norm=cutter.head_norm(layer.k_norm, described, parts.kv_heads),
        qkv=cutter.divided(layer.qkv, qkv),
        output=cutter.summed(layer.output, parts.queries),
        mlp=cutter.mlp(layer.mlp, described),
        sinks=layer.sinks[parts.heads].clone() if layer.sinks is not None else None,
    )


def padded_ends(embeddings: Tensor, head: Matrix, parts: RankParts) -> tuple[Tensor, Matrix]:
    """Returns a rank's rows of embeddings and head with the zeros that make all ranks have as many."""
    places = replace(parts.whole, shard=parts.shard).vocabulary
    missing = places.stop - places.start - len(embeddings)
    if not missing:
        return embeddings, head
    padded = functional.pad(embeddings, (0, 0, 0, missing))
    if isinstance(head, PlainMatrix):
        is_tied = head.weight is embeddings
        return padded, PlainMatrix(padded if is_tied else functional.pad(head.weight, (0, 0, 0, missing)))
    return padded, joined([head, PlainMatrix(embeddings.new_zeros(missing, embeddings.shape[1]))])


class _Cutter:
    """Cuts the parts of a layer."""

    def __init__(self, parts: RankParts, dtype: torch.dtype) -> None:
        self._parts = parts
        self._dtype = dtype

    def divided(self, linear: LinearWeights, part: MatrixPart) -> LinearWeights:
        """Returns some rows."""
        bias = _rows(linear.bias, part.rows) if linear.bias is not None else None
        return LinearWeights(part_of(linear.matrix, part, self._dtype), bias)

    def summed(self, linear: LinearWeights, columns: slice) -> LinearWeights:
        """Returns some columns; the first rank has the bias."""
        matrix = part_of(linear.matrix, MatrixPart(None, columns), self._dtype)
        return LinearWeights(matrix, linear.bias if self._parts.is_first else None)

    def head_norm(self, weights: Tensor | None, described: LayerDescription, heads: slice) -> Tensor | None:
        """Returns the weights of some heads, where each has its own."""
        if weights is None or described.qk_norm is QkNorm.HEAD:
            return weights
        width = self._parts.whole.head_dim
        return weights[heads.start * width : heads.stop * width].clone()

    def mlp(self, weights: MlpWeights | ExpertWeights, described: LayerDescription) -> MlpWeights | ExpertWeights:
        """Returns some of the width."""
        if isinstance(weights, ExpertWeights):
            return self._experts(weights, described)
        assert isinstance(described.mlp, MlpDescription), (
            "the layer's weights are of the kind that its description says"
        )
        (gate_up,) = self._parts.gate_up(described.mlp, modules=1)
        width = self._parts.width(described.mlp.width)
        return MlpWeights(self.divided(weights.gate_up, gate_up), self.summed(weights.down, width))

    def _experts(self, weights: ExpertWeights, described: LayerDescription) -> ExpertWeights:
        whole = described.mlp.width
        inner = self._parts.width(whole)
        rows = inner, slice(whole + inner.start, whole + inner.stop)
        bias, down_bias = weights.gate_up_bias, weights.down_bias
        return replace(
            weights,
            gate_up=self._each(weights.gate_up, MatrixPart(rows)),
            gate_up_bias=torch.cat([bias[:, each] for each in rows], dim=1) if bias is not None else None,
            down=self._each(weights.down, MatrixPart(None, inner)),
            down_bias=down_bias if self._parts.is_first else None,
            shared=self._shared(weights.shared) if weights.shared is not None else None,
        )

    def _each(self, experts: ExpertMatrices, part: MatrixPart) -> ExpertMatrices:
        return ExpertMatrices.of_each([part_of(matrix, part, self._dtype) for matrix in experts.matrices])

    def _shared(self, shared: SharedExpertWeights) -> SharedExpertWeights:
        whole = shared.down.size[1]
        inner = self._parts.width(whole)
        rows = MatrixPart((inner, slice(whole + inner.start, whole + inner.stop)))
        return replace(shared, gate_up=self.divided(shared.gate_up, rows), down=self.summed(shared.down, inner))


def _rows(tensor: Tensor, rows: Sequence[slice] | None) -> Tensor:
    return tensor if rows is None else torch.cat([tensor[each] for each in rows])
