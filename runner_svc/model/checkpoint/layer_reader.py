"""Reads tensors by the names of a family, and merges them into the decoder's weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from runner_svc.interface.ranks import WHOLE, Shard
from runner_svc.model.checkpoint.expert_reader import ExpertReader
from runner_svc.model.checkpoint.quantized_matrices import MatrixReader
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.description import LayerDescription, NormKind, QkNorm
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.rank_parts import RankParts
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix, joined
from runner_svc.weights.matrix_part import ALL, WHOLE_MATRIX, MatrixPart, Region
from runner_svc.weights.model_weights import LayerWeights, MlpWeights
from runner_svc.weights.plain_matrix import PlainMatrix


def _all_plain(module: str, part: MatrixPart = WHOLE_MATRIX, /) -> Matrix | None:
    return None


def _unchanged(matrix: Matrix) -> Matrix:
    return matrix


class LayerReader:
    """Reads one model's tensors, or a rank's part of them."""

    def __init__(
        self,
        config: ModelConfig,
        base: str,
        read: Callable[..., Tensor],
        tensors: Container[str],
        read_exact: Callable[..., Tensor] | None = None,
        quantized: MatrixReader = _all_plain,
        quantize: Callable[[Matrix], Matrix] | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """`config` is the whole model's, and `shard` is the rank's.

        `read` returns the tensor of a name, or slices of its first dimensions, in the type and on the device that are
        wanted. `read_exact` returns it in the type that it is stored in; by default there is no other. `quantized`
        returns the matrix of a module that is quantized in the checkpoint. Each plain matrix of a layer becomes what
        `quantize` returns.
        """
        self._parts = RankParts(config, shard)
        self._quantized = quantized
        self._quantize = quantize or _unchanged
        self.config = config
        self._base = base
        self._read = read
        self._read_exact = read_exact
        self._tensors = tensors

    def name(self, module: str, kind: str) -> str:
        """Returns the name of a tensor below the base."""
        return f"{self._base}{module}.{kind}"

    def norm(self, module: str, kind: NormKind) -> Tensor:
        """Returns a norm's weights, as `NormKind` says."""
        weight = self._read(self.name(module, "weight"))
        if kind is not NormKind.LAYER:
            return weight
        bias = self._read(self.name(module, "bias")) if self.config.names.norm_bias else torch.zeros_like(weight)
        return torch.stack((weight, bias))

    def positions(self) -> Tensor | None:
        """Returns the table of learned positions, [context_length, hidden_size], or None."""
        offset = self.config.model.position_offset
        if offset is None:
            return None
        table = self._read(self.name(self.config.names.positions, "weight"))
        return table[offset : offset + self.config.context_length]

    def layer(self, index: int) -> LayerWeights:
        """Returns a layer's weights."""
        names, described = self.config.names, self.config.layers[index]
        prefix = f"{names.layers}.{index}"
        has_qk_norm = described.qk_norm is not QkNorm.NONE
        return LayerWeights(
            attention_norm=self._layer_norm(prefix, names.attention_norm, described, described.pre_norms),
            attention_post_norm=self._layer_norm(prefix, names.attention_post_norm, described, described.post_norms),
            q_norm=self._qk_norm(f"{prefix}.{names.q_norm}", described, self._parts.heads) if has_qk_norm else None,
            k_norm=self._qk_norm(f"{prefix}.{names.k_norm}", described, self._parts.kv_heads) if has_qk_norm else None,
            qkv=self._qkv(prefix, described),
            output=self._summed(prefix, names.output, described.output_bias, self._parts.queries),
            mlp_norm=self._layer_norm(
                prefix, names.mlp_norm, described, described.pre_norms and not described.parallel
            ),
            mlp_post_norm=self._layer_norm(prefix, names.mlp_post_norm, described, described.post_norms),
            mlp=self._mlp(prefix, described),
            sinks=self._sinks(f"{self._base}{prefix}.{names.sinks}") if described.sinks else None,
        )

    def _sinks(self, name: str) -> Tensor:
        return self._rows(name, MatrixPart((self._parts.heads,))).float()

    def _mlp(self, prefix: str, described: LayerDescription) -> MlpWeights | ExpertWeights:
        names, mlp = self.config.names, described.mlp
        if isinstance(mlp, ExpertsConfig):
            quantized = self._quantized if self.config.quantization is not None else None
            reader = ExpertReader(
                mlp,
                self.config.hidden_size,
                names.experts,
                self._read,
                self._tensors,
                self._read_exact,
                quantized,
                self._parts,
            )
            return reader.layer(f"{self._base}{prefix}")
        return MlpWeights(
            gate_up=self._linear(prefix, names.gate_up, mlp.bias, self._parts.gate_up(mlp, len(names.gate_up))),
            down=self._summed(prefix, names.down, mlp.bias, self._parts.width(mlp.width)),
        )

    def _layer_norm(self, prefix: str, module: str, described: LayerDescription, is_there: bool) -> Tensor | None:
        return self.norm(f"{prefix}.{module}", described.norm) if is_there else None

    def _linear(
        self, prefix: str, modules: Sequence[str], has_bias: bool, parts: Sequence[MatrixPart], *, quantize: bool = True
    ) -> LinearWeights:
        """Reads modules whose rows the ranks divide."""
        bias = None
        if has_bias:
            each = [
                self._rows(self.name(f"{prefix}.{module}", "bias"), part)
                for module, part in zip(modules, parts, strict=True)
            ]
            bias = each[0] if len(each) == 1 else torch.cat(each)
        change = self._quantized_if_plain if quantize else _unchanged
        matrices = [
            change(self._format(f"{self._base}{prefix}.{module}", part))
            for module, part in zip(modules, parts, strict=True)
        ]
        return LinearWeights(joined(matrices), bias)

    def _summed(self, prefix: str, module: str, has_bias: bool, columns: slice) -> LinearWeights:
        """Reads a module whose columns the ranks divide: they sum what they compute, with one bias."""
        bias = self._read(self.name(f"{prefix}.{module}", "bias")) if has_bias and self._parts.is_first else None
        matrix = self._format(f"{self._base}{prefix}.{module}", MatrixPart(None, columns))
        return LinearWeights(self._quantized_if_plain(matrix), bias)

    def _format(self, module: str, part: MatrixPart) -> Matrix:
        """Returns a part of a module's matrix."""
        if self._parts.is_whole:
            part = WHOLE_MATRIX
        matrix = self._quantized(module, part)
        if matrix is not None:
            return matrix
        regions = [self._region(f"{module}.weight", region) for region in part.regions]
        return PlainMatrix(regions[0] if len(regions) == 1 else torch.cat(regions))

    def _quantized_if_plain(self, matrix: Matrix) -> Matrix:
        return self._quantize(matrix) if isinstance(matrix, PlainMatrix) else matrix

    def _region(self, name: str, region: Region) -> Tensor:
        places = [region.rows, region.columns]
        if self.config.names.transposed:
            places.reverse()
        tensor = self._read(name) if region == ALL else self._read(name, *(each or slice(None) for each in places))
        return tensor.t().contiguous() if self.config.names.transposed else tensor

    def _rows(self, name: str, part: MatrixPart) -> Tensor:
        """Returns a part of a tensor's first dimension."""
        if self._parts.is_whole or part.rows is None:
            return self._read(name)
        return torch.cat([self._read(name, rows) for rows in part.rows])

    def _qkv(self, prefix: str, described: LayerDescription) -> LinearWeights:
        is_moved = self.config.names.interleaved and described.rope is not None
        # Rows of blocks can't be moved one by one: these are quantized afterwards.
        modules = self.config.names.qkv
        parts = self._parts.qkv(len(modules))
        qkv = self._linear(prefix, modules, described.qkv_bias, parts, quantize=not is_moved)
        if not is_moved:
            return qkv
        rows = torch.arange(qkv.size[0])
        width = sum(heads.stop - heads.start for heads in (self._parts.heads, self._parts.kv_heads))
        width *= self.config.head_dim
        order = torch.cat((self._in_halves(rows[:width], described.rope), rows[width:]))
        try:
            matrix = self._quantized_if_plain(qkv.matrix.reordered(order))
        except ValueError as error:
            raise UnsupportedModel(f"{self.config.architecture} can't be read: {error}.") from error
        return LinearWeights(matrix, qkv.bias[order.to(qkv.bias.device)] if qkv.bias is not None else None)

    def _qk_norm(self, module: str, described: LayerDescription, heads: slice) -> Tensor:
        part = WHOLE_MATRIX
        if described.qk_norm is QkNorm.PROJECTION:
            part = MatrixPart((slice(heads.start * self.config.head_dim, heads.stop * self.config.head_dim),))
        elif described.qk_norm is QkNorm.LAYER_HEAD:
            part = MatrixPart((heads,))
        weight = self._rows(self.name(module, "weight"), part).flatten()
        if not self.config.names.interleaved:
            return weight
        return self._in_halves(weight, described.rope)

    def _in_halves(self, rows: Tensor, rope: int | None) -> Tensor:
        """Reorders the dimensions of each head, the rows, so that i and i + rotary_dim / 2 rotate together.

        Dot products of queries and keys do not change by that.
        """
        if rope is None:
            return rows
        order = torch.arange(self.config.head_dim, device=rows.device)
        rotary_dim = self.config.ropes[rope].rotary_dim
        order[:rotary_dim] = torch.cat((order[0:rotary_dim:2], order[1:rotary_dim:2]))
        return rows.unflatten(0, (-1, self.config.head_dim))[:, order].flatten(0, 1)
