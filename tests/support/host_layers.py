"""The launchers of a decoder's layers in plain torch on the CPU, for `host_device`: norms, products, RoPE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner_svc.arithmetic.plain import ACTIVATION_FUNCTIONS
from runner_svc.decoder.norm import HeadNorm, Norm
from runner_svc.interface.products.linear_launchers import QuantizedRows, Rows, Scaling, Sums
from runner_svc.interface.products.skinny_launchers import RouterParts, ScaledRows, TileSums
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.description import NormKind, QkNorm
from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix, plain_tensor


class HostNorm:
    def __init__(self, eps: float, kind: NormKind = NormKind.RMS, multiplier: float = 1.0) -> None:
        self._eps, self._kind, self._multiplier = eps, kind, multiplier

    def add(self, stream: int, hidden: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> None:
        residual.add_(hidden, alpha=self._multiplier)
        self.norm(stream, residual, weight, out)

    def add_normed(
        self, stream: int, hidden: Tensor, residual: Tensor, post_weight: Tensor, weight: Tensor | None, out: Tensor
    ) -> None:
        residual.add_(self._normed(hidden, post_weight), alpha=self._multiplier)
        if weight is not None:
            self.norm(stream, residual, weight, out)

    def norm(self, stream: int, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(self._normed(hidden, weight))

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return Norm(self._kind, weight.float(), self._eps)(hidden.float())


def host_embed(
    stream: int,
    tokens: Tensor,
    embeddings: Tensor,
    norm_weight: Tensor,
    residual: Tensor,
    out: Tensor,
    sums: TileSums,
) -> ScaledRows:
    residual.copy_(embeddings[tokens.long()])
    return unscaled_norm(residual, norm_weight, out, sums)


def host_embed_part(stream: int, tokens: Tensor, embeddings: Tensor, begin: int, out: Tensor) -> None:
    places = tokens.long() - begin
    ours = (places >= 0) & (places < len(embeddings))
    out.zero_()
    out[ours] = embeddings[places[ours]]


def unscaled_norm(residual: Tensor, norm_weight: Tensor, out: Tensor, sums: TileSums) -> ScaledRows:
    """Computes RMSNorm without the factor 1 / rms."""
    out.copy_(residual * norm_weight)
    sums.squares[0, : len(residual)] = residual.float().square().sum(dim=1)
    sums.largest[0, : len(residual)] = out.float().abs().amax(dim=1)
    return ScaledRows(out, sums.squares[:1], sums.largest[:1])


class HostProducts:
    """Products of few rows with matrices of any format, by their definition."""

    def __init__(self, config: ModelConfig) -> None:
        self._eps = config.norm_eps
        self._activation = ACTIVATION_FUNCTIONS[config.activation]

    def fits(self, matrix: Matrix) -> bool:
        return True

    def store(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor) -> None:
        out.copy_(self._multiply(x, matrix))

    def gated(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor, sums: TileSums) -> ScaledRows:
        gate, up = self._multiply(x, matrix).chunk(2, dim=-1)
        out.copy_(self._activation(gate) * up)
        sums.largest[0, : len(out)] = out.float().abs().amax(dim=1)
        return ScaledRows(out, None, sums.largest[:1])

    def add(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        sums: TileSums,
    ) -> ScaledRows:
        residual += self._multiply(x, matrix).to(residual.dtype)
        return unscaled_norm(residual, norm_weight, out, sums)

    def add_and_route(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        sums: TileSums,
        router: RouterParts,
    ) -> ScaledRows:
        normed = self.add(stream, x, matrix, residual, norm_weight, out, sums)
        for index, logits in enumerate(router.logits):
            own = slice(index * 64, index * 64 + 64)
            torch.mv(router.weight[:, own].float(), normed.rows[0, own].float(), out=logits)
        return ScaledRows(normed.rows, normed.squares, logits=router.logits)

    def _multiply(self, x: ScaledRows, matrix: Matrix) -> Tensor:
        rows = x.rows.float()
        if x.squares is not None:
            squares = x.squares[:, : len(rows)].sum(dim=0) / matrix.size[1]
            rows = rows * torch.rsqrt(squares + self._eps).unsqueeze(1)
        product = torch.empty(len(rows), matrix.size[0])
        matrix.multiply(rows, None, product)
        return product


class HostRoundingNorm:
    """A norm whose rows are rounded as the next product takes them: codes are the numbers, and scales are one."""

    def __init__(self, norm: HostNorm) -> None:
        self._norm = norm

    def rounds(self, rounding: Rounding) -> bool:
        return True

    def __call__(
        self, stream: int, hidden: Sums | None, residual: Tensor, weight: Tensor, rounding: Rounding
    ) -> QuantizedRows:
        out = torch.empty_like(residual)
        if hidden is None:
            self._norm.norm(stream, residual, weight, out)
        else:
            self._norm.add(stream, scaled(hidden), residual, weight, out)
        return QuantizedRows(rounding.rounded(out), torch.ones(len(out), 1), rounding)


class HostFp8Linear:
    """Products of FP8 matrices that take more than two rows rounded."""

    def adds(self, matrix: Matrix) -> bool:
        return False

    def takes(self, matrix: Matrix, rows: int) -> Rounding | None:
        assert isinstance(matrix, Fp8Matrix)
        return matrix.rounding if rows > 2 else None

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        if not isinstance(x, QuantizedRows):
            matrix.multiply(x, bias, out)
            return
        assert x.rounding == self.takes(matrix, len(x))
        product = x.codes.float() * x.scales @ matrix.dequantized().t()
        out.copy_(product if bias is None else product + bias)

    def sums(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> Sums:
        product = torch.empty_like(out)
        self.multiply(stream, x, matrix, bias, product)
        if not isinstance(x, QuantizedRows) or bias is not None:
            return Sums(product)
        factors, scales = (2.0 ** torch.randint(-3, 4, (size,)) for size in product.shape)
        sums = (product / factors.unsqueeze(1) / scales).to(out.dtype)
        return Sums(sums, Scaling(factors, scales))

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        product = torch.empty_like(total)
        self.multiply(stream, x, matrix, bias, product)
        total.add_(product, alpha=factor)


def scaled(product: Sums) -> Tensor:
    """Returns the product that sums stand for."""
    if product.scaling is None:
        return product.sums
    numbers = product.sums * product.scaling.factors.view(-1, 1) * product.scaling.scales.view(1, -1)
    return numbers.to(product.sums.dtype)


class HostActivation:
    def __init__(self, name: str, gated: bool = True) -> None:
        self._function, self._gated = ACTIVATION_FUNCTIONS[name], gated

    def __call__(self, stream: int, gate_up: Tensor, out: Tensor) -> None:
        if not self._gated:
            out.copy_(self._function(gate_up))
            return
        gate, up = gate_up.chunk(2, dim=-1)
        out.copy_(self._function(gate) * up)


class HostGated:
    def __init__(self, name: str) -> None:
        self._activation = HostActivation(name)
        self.prepared = 0  # positions for which it was prepared

    def fits(self, matrix: Matrix) -> bool:
        return isinstance(matrix, PlainMatrix)

    def prepare(self, max_tokens: int, matrix: Matrix) -> None:
        self.prepared = max_tokens

    def __call__(self, stream: int, x: Any, matrix: Matrix, out: Tensor, takes: Rounding | None = None) -> Tensor:
        self._activation(stream, x @ plain_tensor(matrix).t(), out)
        return out


class HostRopeKv:
    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        eps: float,
        qk_norm: QkNorm = QkNorm.NONE,
        norm: NormKind = NormKind.RMS,
    ) -> None:
        self._sizes = num_heads, num_kv_heads, head_dim
        self._rotary_dim = rotary_dim
        self._eps, self._qk_norm, self._norm = eps, qk_norm, norm
        self.scales = qk_norm is not QkNorm.PROJECTION

    def __call__(
        self,
        stream: int,
        qkv: Tensor,
        queries: Tensor,
        cache: Tensor,
        rotations: Tensor,
        rotation_rows: Tensor,
        slot_mapping: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        cache_scales: Tensor | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        heads, kv_heads, head_dim = self._sizes
        qkv = scaled(Sums(qkv, scaling))
        split = qkv.clone().view(-1, heads + 2 * kv_heads, head_dim)
        for part, weight in ((split[:, :heads], q_norm), (split[:, heads : heads + kv_heads], k_norm)):
            if weight is not None:
                part.copy_(HeadNorm(self._qk_norm, self._norm, weight.float(), self._eps)(part.float()))
        if self._rotary_dim:
            half = self._rotary_dim // 2
            cos, sin = rotations[rotation_rows.long()].unsqueeze(1).split(half, dim=-1)
            x, y = split[:, : heads + kv_heads, : 2 * half].clone().split(half, dim=-1)
            split[:, : heads + kv_heads, :half] = x * cos - y * sin
            split[:, : heads + kv_heads, half : 2 * half] = y * cos + x * sin
        queries.copy_(split[:, :heads].flatten(1))
        positions = cache.view(2, -1, kv_heads, head_dim)
        for half in range(2):
            written = split[:, heads + half * kv_heads :][:, :kv_heads]
            if cache_scales is not None:
                written = (written / cache_scales[half].unsqueeze(-1)).clamp(-448, 448).to(cache.dtype)
            positions[half].view(torch.uint8)[slot_mapping.long()] = written.contiguous().view(torch.uint8)
