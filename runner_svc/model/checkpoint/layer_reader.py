"""Reads tensors by the names of a family, and merges them into the decoder's weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from runner_svc.model.checkpoint.expert_reader import ExpertReader
from runner_svc.model.config import ModelConfig
from runner_svc.model.errors import UnsupportedModel
from runner_svc.model.families.description import LayerDescription, NormKind, QkNorm
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.weights.expert_weights import ExpertWeights
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix, joined
from runner_svc.weights.model_weights import LayerWeights, MlpWeights
from runner_svc.weights.plain_matrix import PlainMatrix


def _all_plain(module: str) -> Matrix | None:
    return None


def _unchanged(matrix: Matrix) -> Matrix:
    return matrix


class LayerReader:
    """Reads one model's tensors."""

    def __init__(
        self,
        config: ModelConfig,
        base: str,
        read: Callable[[str], Tensor],
        tensors: Container[str],
        read_exact: Callable[[str], Tensor] | None = None,
        quantized: Callable[[str], Matrix | None] = _all_plain,
        quantize: Callable[[Matrix], Matrix] | None = None,
    ) -> None:
        """`read` returns the tensor of a name, in the type and on the device that are wanted.

        `read_exact` returns it in the type that it is stored in; by default there is no other. `quantized` returns the
        matrix of a module that is quantized in the checkpoint. Each plain matrix of a layer becomes what `quantize`
        returns.
        """
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
            q_norm=self._qk_norm(f"{prefix}.{names.q_norm}", described) if has_qk_norm else None,
            k_norm=self._qk_norm(f"{prefix}.{names.k_norm}", described) if has_qk_norm else None,
            qkv=self._qkv(prefix, described),
            output=self._linear(prefix, (names.output,), described.output_bias),
            mlp_norm=self._layer_norm(
                prefix, names.mlp_norm, described, described.pre_norms and not described.parallel
            ),
            mlp_post_norm=self._layer_norm(prefix, names.mlp_post_norm, described, described.post_norms),
            mlp=self._mlp(prefix, described),
            sinks=self._read(f"{self._base}{prefix}.{names.sinks}").float() if described.sinks else None,
        )

    def _mlp(self, prefix: str, described: LayerDescription) -> MlpWeights | ExpertWeights:
        names, mlp = self.config.names, described.mlp
        if isinstance(mlp, ExpertsConfig):
            quantized = self._quantized if self.config.quantization is not None else None
            reader = ExpertReader(
                mlp, self.config.hidden_size, names.experts, self._read, self._tensors, self._read_exact, quantized
            )
            return reader.layer(f"{self._base}{prefix}")
        return MlpWeights(
            gate_up=self._linear(prefix, names.gate_up, mlp.bias), down=self._linear(prefix, (names.down,), mlp.bias)
        )

    def _layer_norm(self, prefix: str, module: str, described: LayerDescription, is_there: bool) -> Tensor | None:
        return self.norm(f"{prefix}.{module}", described.norm) if is_there else None

    def _linear(self, prefix: str, modules: Sequence[str], has_bias: bool, *, quantize: bool = True) -> LinearWeights:
        bias = None
        if has_bias:
            parts = [self._matrix(self.name(f"{prefix}.{module}", "bias")) for module in modules]
            bias = parts[0] if len(parts) == 1 else torch.cat(parts)
        change = self._quantized_if_plain if quantize else _unchanged
        matrices = [change(self._format(f"{self._base}{prefix}.{module}")) for module in modules]
        return LinearWeights(joined(matrices), bias)

    def _format(self, module: str) -> Matrix:
        matrix = self._quantized(module)
        return PlainMatrix(self._matrix(f"{module}.weight")) if matrix is None else matrix

    def _quantized_if_plain(self, matrix: Matrix) -> Matrix:
        return self._quantize(matrix) if isinstance(matrix, PlainMatrix) else matrix

    def _matrix(self, name: str) -> Tensor:
        tensor = self._read(name)
        return tensor.t().contiguous() if self.config.names.transposed and tensor.dim() == 2 else tensor

    def _qkv(self, prefix: str, described: LayerDescription) -> LinearWeights:
        is_moved = self.config.names.interleaved and described.rope is not None
        # Rows of blocks can't be moved one by one: these are quantized afterwards.
        qkv = self._linear(prefix, self.config.names.qkv, described.qkv_bias, quantize=not is_moved)
        if not is_moved:
            return qkv
        rows = torch.arange(qkv.size[0])
        width = (self.config.num_heads + self.config.num_kv_heads) * self.config.head_dim
        order = torch.cat((self._in_halves(rows[:width], described.rope), rows[width:]))
        try:
            matrix = self._quantized_if_plain(qkv.matrix.reordered(order))
        except ValueError as error:
            raise UnsupportedModel(f"{self.config.architecture} can't be read: {error}.") from error
        return LinearWeights(matrix, qkv.bias[order.to(qkv.bias.device)] if qkv.bias is not None else None)

    def _qk_norm(self, module: str, described: LayerDescription) -> Tensor:
        weight = self._read(self.name(module, "weight")).flatten()
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
