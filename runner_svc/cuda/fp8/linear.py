"""Products of any number of rows with matrices of FP8 on Hopper.

Up to `FEW` rows Roster's kernel is faster than torch's products, and another up to 256 with some matrices
(`many_variant`). Otherwise torch multiplies codes with scales of one, which is its fastest recipe, and the next kernel
multiplies the sums by the scales of rows and columns, or one of its own where the next can't. Blocks of 128 have a
recipe of torch's. What torch lacks, Roster's kernel of few rows does in pieces of 128 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.fp8.many import Fp8ManyRows
from runner_svc.cuda.fp8.product import Fp8Products, fits, fp8_matrix
from runner_svc.cuda.fp8.rows import GROUP, Fp8Rows, RoundingArguments, quantized, rounded_rows
from runner_svc.cuda.fp8.scale import Fp8Scale
from runner_svc.interface.products.linear_launchers import QuantizedRows, Rows, Scaling, Sums
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.weights.activation_rounding import Rounding
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.matrix import Matrix

FEW = 64
"""Rows up to which Roster's kernel of few rows multiplies."""


class Fp8Linear:
    """A `LinearLauncher` and `GatedLauncher` of one model's matrices of FP8; x is in bfloat16."""

    def __init__(self, eps: float, activation: str, device: torch.device, *, overlap: bool = False) -> None:
        """Raises KeyError for an unknown activation."""
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._no_sums = TileSums.allocate(0, device)
        self._few = Fp8Products(eps, activation, overlap=overlap)
        self._many = Fp8ManyRows(activation, overlap=overlap)
        self._rows = Fp8Rows(eps, activation, overlap=overlap)
        self._scale = Fp8Scale(activation, overlap=overlap)

    def adds(self, matrix: Matrix) -> bool:
        """Returns False."""
        return False

    def takes(self, matrix: Matrix, rows: int) -> Rounding | None:
        """Returns the matrix's rounding, if torch multiplies codes of that number of rows."""
        weight = fp8_matrix(matrix)
        return weight.rounding if rows > FEW and fits(matrix) and (_has_sums(weight) or _has_blocks(weight)) else None

    def multiply(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        """Fills `out` [T, out]; the stride of its rows is a multiple of 4. Quantized rows are as `takes` says."""
        weight = fp8_matrix(matrix)
        if isinstance(x, QuantizedRows):
            self._multiply_codes(stream, x, weight, bias, out)
        elif not fits(matrix):
            matrix.multiply(x, bias, out)
        elif self.takes(matrix, len(x)) is not None:
            self._multiply_codes(stream, self._rounded(stream, x, weight), weight, bias, out)
        else:
            for begin in range(0, len(x), MAX_ROWS):
                piece = slice(begin, begin + MAX_ROWS)
                self._few.store(stream, ScaledRows(x[piece], None), weight, out[piece])
            if bias is not None:
                out.add_(bias)

    def sums(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, out: Tensor) -> Sums:
        """Returns the product, of more than `FEW` rows as torch leaves it; else `out`, which it fills."""
        weight = fp8_matrix(matrix)
        if bias is not None or (not isinstance(x, QuantizedRows) and self.takes(matrix, len(x)) is None):
            self.multiply(stream, x, matrix, bias, out)
            return Sums(out)
        if not isinstance(x, QuantizedRows):
            x = self._rounded(stream, x, weight)
        return Sums(out) if self._many.store(stream, x, weight, out) else self._codes_sums(x, weight)

    def _codes_sums(self, x: QuantizedRows, weight: Fp8Matrix) -> Sums:
        if _has_blocks(weight):
            return Sums(_multiply_blocks(x, weight))
        return Sums(self._sums(x.codes, weight, torch.bfloat16), Scaling(x.scales, weight.scales))

    def _multiply_codes(
        self, stream: int, x: QuantizedRows, weight: Fp8Matrix, bias: Tensor | None, out: Tensor
    ) -> None:
        if bias is None and self._many.store(stream, x, weight, out):
            return
        if _has_sums(weight):
            self._scale(stream, self._sums(x.codes, weight, out.dtype), x.scales, weight.scales, bias, out)
            return
        out.copy_(_multiply_blocks(x, weight))
        if bias is not None:
            out.add_(bias)

    def add(self, stream: int, x: Rows, matrix: Matrix, bias: Tensor | None, total: Tensor, factor: float) -> None:
        """Adds factor * (x W^T + b) to `total` [T, out]."""
        product = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        self.multiply(stream, x, matrix, bias, product)
        total.add_(product, alpha=factor)

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether there is a gated product for this matrix, gate above up."""
        if not fits(matrix) or matrix.size[0] % 32:
            return False
        weight = fp8_matrix(matrix)
        return _has_sums(weight) or _has_blocks(weight)

    def prepare(self, max_tokens: int, matrix: Matrix) -> None:
        """Does nothing: the first product, at start, compiles what all use."""

    def __call__(self, stream: int, x: Rows, matrix: Matrix, out: Tensor, takes: Rounding | None = None) -> Rows:
        """Computes [T, n] from x [T, width] and the matrix [2 * n, width], which is G above U; all contiguous.

        Returns `out`, which it fills, or rows rounded as `takes` says.
        """
        weight = fp8_matrix(matrix)
        if not isinstance(x, QuantizedRows) and len(x) <= FEW:
            self._few.gated(stream, ScaledRows(x, None), weight, out, self._no_sums)
            return out
        if not isinstance(x, QuantizedRows):
            x = self._rounded(stream, x, weight)
        if self._many.gated(stream, x, weight, out):
            return out
        gate_up = self._codes_sums(x, weight)
        if takes is not None and out.shape[1] % 16 == 0:
            activated = rounded_rows(len(x), out.shape[1], out.device)
            self._rows.activated(stream, gate_up, RoundingArguments.of(takes), activated)
            return quantized(activated, takes)
        scaling = gate_up.scaling or Scaling(*(torch.ones(size, device=out.device) for size in gate_up.sums.shape))
        self._scale(stream, gate_up.sums, scaling.factors, scaling.scales, None, out, gated=True)
        return out

    def _rounded(self, stream: int, x: Tensor, weight: Fp8Matrix) -> QuantizedRows:
        rounded = rounded_rows(len(x), x.shape[1], x.device)
        self._rows(stream, ScaledRows(x, None), RoundingArguments.of(weight.rounding), rounded)
        return quantized(rounded, weight.rounding)

    def _sums(self, codes: Tensor, weight: Fp8Matrix, dtype: torch.dtype) -> Tensor:
        """Returns codes of x times W's, `dtype` [T, out]."""
        return torch._scaled_mm(codes, weight.codes.t(), self._one, self._one, out_dtype=dtype)


def _has_sums(weight: Fp8Matrix) -> bool:
    return weight.block is None and weight.size[0] % 16 == 0


def _has_blocks(weight: Fp8Matrix) -> bool:
    return (
        weight.block == (GROUP, GROUP)
        and hasattr(torch.nn.functional, "scaled_mm")
        and not any(size % GROUP for size in weight.size)
    )


def _multiply_blocks(x: QuantizedRows, weight: Fp8Matrix) -> Tensor:
    """Returns the product, bfloat16 [T, out]. Torch supports only multiples of 4 rows.

    It takes the scales of W's blocks with a number of columns that is a multiple of 4, and does not use those beyond
    the last.
    """
    recipe, rows = torch.nn.functional.ScalingType, len(x)
    codes, scales, block_scales = x.codes, x.scales.t(), weight.scales
    if padding := -rows % 8:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, padding)).view(codes.dtype)
        scales = torch.nn.functional.pad(scales, (0, padding))
    if padding := -block_scales.shape[1] % 4:
        block_scales = torch.nn.functional.pad(block_scales, (0, padding))
    product = torch.nn.functional.scaled_mm(
        codes,
        weight.codes.t(),
        scales.contiguous().t(),
        recipe.BlockWise1x128,
        block_scales.t(),
        recipe.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product[:rows]
