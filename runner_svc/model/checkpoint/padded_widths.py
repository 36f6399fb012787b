"""Pads a rank's MLPs and experts with zeros to the width that all ranks have, where the whole width has no equal parts.

Zeros of gate and up make zeros, as every activation of 0 is 0, and down multiplies these with zeros.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from runner_svc.model.families.description import MlpDescription
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.rank_parts import RankParts
from runner_svc.weights.cutting import padded, region_of
from runner_svc.weights.expert_matrices import ExpertMatrices
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix, joined
from runner_svc.weights.matrix_part import Region
from runner_svc.weights.model_weights import MlpWeights


def padded_mlp(
    weights: MlpWeights | ExpertWeights,
    described: MlpDescription | ExpertsConfig,
    parts: RankParts,
    dtype: torch.dtype,
) -> MlpWeights | ExpertWeights:
    """Returns a rank's part of an MLP or of experts with the width of all ranks. `described`: the whole one."""
    if parts.is_whole:
        return weights
    if isinstance(described, MlpDescription):
        assert isinstance(weights, MlpWeights), "the weights are of the kind that the description says"
        padding = _Padding.of(parts, described.width, dtype)
        if padding is None:
            return weights
        gate_up = padding.rows(weights.gate_up, 1 + described.gated)
        return MlpWeights(gate_up, weights.down.mapped(padding.columns))
    assert isinstance(weights, ExpertWeights), "the weights are of the kind that the description says"
    return _padded_experts(weights, described, parts, dtype)


def _padded_experts(
    weights: ExpertWeights, described: ExpertsConfig, parts: RankParts, dtype: torch.dtype
) -> ExpertWeights:
    padding = _Padding.of(parts, described.width, dtype)
    if padding is not None:
        bias = weights.gate_up_bias
        weights = replace(
            weights,
            gate_up=ExpertMatrices.of_each([padding.row_matrix(each, 2) for each in weights.gate_up.matrices]),
            gate_up_bias=padding.bias(bias, 2) if bias is not None else None,
            down=ExpertMatrices.of_each([padding.columns(each) for each in weights.down.matrices]),
        )
    padding = _Padding.of(parts, described.shared_width, dtype) if described.shared_width is not None else None
    if padding is None or weights.shared is None:
        return weights
    shared = weights.shared
    gate_up, down = padding.rows(shared.gate_up, 2), shared.down.mapped(padding.columns)
    return replace(weights, shared=replace(shared, gate_up=gate_up, down=down))


class _Padding:
    """From the `own` width of a rank to that of all."""

    def __init__(self, own: int, width: int, dtype: torch.dtype) -> None:
        self._own, self._width, self._dtype = own, width, dtype

    @classmethod
    def of(cls, parts: RankParts, whole: int, dtype: torch.dtype) -> _Padding | None:
        """Returns that of a rank; None: it has all ranks' width."""
        own, width = parts.width(whole), parts.padded_width(whole)
        return None if own.stop - own.start == width else cls(own.stop - own.start, width, dtype)

    def rows(self, linear: LinearWeights, count: int) -> LinearWeights:
        """Pads the rows of gate and up, or of up alone, `count` of them beneath each other."""
        bias = self.bias(linear.bias, count) if linear.bias is not None else None
        return LinearWeights(self.row_matrix(linear.matrix, count), bias)

    def row_matrix(self, matrix: Matrix, count: int) -> Matrix:
        """Pads the rows of a matrix; see `rows`."""
        pieces = [slice(index * self._own, (index + 1) * self._own) for index in range(count)]
        own = (region_of(matrix, Region(rows=rows), self._dtype) for rows in pieces)
        return joined([padded(each, self._width, matrix.size[1], self._dtype) for each in own])

    def columns(self, matrix: Matrix) -> Matrix:
        """Pads the columns of down."""
        return padded(matrix, matrix.size[0], self._width, self._dtype)

    def bias(self, bias: Tensor, count: int) -> Tensor:
        """Pads the bias [..., rows] of `rows`."""
        pieces = bias.unflatten(-1, (count, self._own))
        return torch.nn.functional.pad(pieces, (0, self._width - self._own)).flatten(-2)
