"""Launches kernels/fp8_product.cu: products of up to 128 rows with a matrix of FP8, with norms and activations fused.

Supports only Hopper, and bfloat16 as `runner_svc.cuda.products.skinny_product` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.fp8.rows import GROUP, Fp8Rows, RoundedRows, RoundingArguments, rounded_rows
from runner_svc.cuda.fp8.variant import MOST_GROUPED_COLUMNS, QUAD, TILE_ROWS, Fp8Variant
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.tensor_map import codes_map
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.matrix import Matrix

Choose = Callable[..., Fp8Variant]
"""As `Fp8Variant.choose` without its number of blocks."""

_TWO_BLOCKS = partial(Fp8Variant.choose, 2)
# Size of the cache: maps of a model's weights for a few boxes, and of rounded rows.
_MAX_MAPS = 4096
_NO_MAP = bytes(128)


@dataclass(frozen=True, slots=True)
class _Addition:
    """What a product with the residual stream takes more."""

    residual: Tensor
    norm_weight: Tensor
    squares: Tensor


class Fp8Products:
    """The products of one model. Matrices are [out, in]; x has up to 128 rows."""

    def __init__(
        self,
        eps: float,
        activation: str,
        choose: Choose = _TWO_BLOCKS,
        *,
        overlap: bool = False,
        canonical: bool = False,
    ) -> None:
        """`choose` selects variants; `canonical`: bits are those of docs/determinism.md.

        Raises KeyError for an unknown activation.
        """
        self._eps = eps
        self._canonical = canonical
        self._choose = choose
        self._activation = ACTIVATIONS[activation]
        self._overlap = overlap
        self._rows = Fp8Rows(eps, overlap=overlap, canonical=canonical)
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_MAPS)(codes_map)
        self._space = lru_cache(None)(rounded_rows)

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether the kernel supports this matrix."""
        return fits(matrix)

    def store(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> None:
        """Computes out = norm(x) W^T; `out` is [T, out], bfloat16 or float32.

        The stride of its rows is a multiple of 4. Here and in the other products, `bias` is added to norm(x) W^T.
        """
        self._launch(stream, "EPILOGUE_STORE", x, matrix, out, bias=bias)

    def gated(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        out: Tensor,
        sums: TileSums,
        bias: Tensor | None = None,
    ) -> ScaledRows:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T); the matrix is G above U, `out` is [T, out / 2]."""
        self._launch(stream, "EPILOGUE_GATED", x, matrix, out, bias=bias)
        return ScaledRows(out, None)

    def add(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        sums: TileSums,
        bias: Tensor | None = None,
    ) -> ScaledRows:
        """Computes residual += norm(x) W^T and out = residual * norm_weight; the next norm's factor is left to `sums`.

        `residual` and `out` are [T, out]. Returns `out` with the sums of squares as the input of the next product.
        """
        squares = sums.squares[: -(-matrix.size[0] // TILE_ROWS)]
        self._launch(stream, "EPILOGUE_RESIDUAL", x, matrix, out, _Addition(residual, norm_weight, squares), bias)
        return ScaledRows(out, squares)

    def _launch(
        self,
        stream: int,
        epilogue: str,
        x: ScaledRows,
        matrix: Matrix,
        out: Tensor,
        addition: _Addition | None = None,
        bias: Tensor | None = None,
    ) -> None:
        weight, num_tokens = fp8_matrix(matrix), len(x.rows)
        num_rows, width = weight.size
        rounding = RoundingArguments.of(weight.rounding)
        variant = self._choose(num_tokens, num_rows, width, grouped=rounding.grouped)
        rounded = None
        if not variant.resident:
            rounded = self._space(MAX_ROWS, width, x.rows.device)
            self._rows(stream, x, rounding, rounded)
        tiles = -(-num_rows // variant.tile_rows)
        grid = tiles * variant.split
        if variant.split == 1:
            grid = min(grid, variant.blocks * num_multiprocessors())
        box_rows = variant.tile_rows // (2 if epilogue == "EPILOGUE_GATED" else 1)
        self._kernel(variant, epilogue, out.dtype, rounding.static, bias is not None)(
            stream,
            grid,
            self._map(weight.codes.data_ptr(), num_rows, width, box_rows, read_once=True),
            _NO_MAP
            if rounded is None
            else self._map(rounded.codes.data_ptr(), MAX_ROWS, width, variant.tokens, read_once=False),
            *_inputs(x, rounded),
            weight.scales.data_ptr(),
            address_of(x.squares),
            len(x.squares) if x.squares is not None else 0,
            1.0 / width,
            self._eps,
            rounding.bound,
            out.data_ptr(),
            addition.residual.data_ptr() if addition is not None else 0,
            addition.norm_weight.data_ptr() if addition is not None else 0,
            addition.squares.data_ptr() if addition is not None else 0,
            width,
            tiles,
            out.shape[1],
            out.stride(0),
            num_tokens,
            address_of(bias),
        )

    def _compile(self, variant: Fp8Variant, epilogue: str, out: torch.dtype, static: bool, has_bias: bool) -> Kernel:
        defines = variant.defines | {
            "STATIC": int(static),
            "EPILOGUE": epilogue,
            "OUT": DTYPE_DEFINES[out],
            "ACTIVATION": self._activation,
            **({"CANONICAL": 1} if self._canonical else {}),
            **({"BIAS": 1} if has_bias else {}),
        }
        return Kernel(
            load("fp8_product", defines),
            "fp8_product",
            # maps of weights and codes of x; x, factors and scales of its codes; scales of weights; squares, number,
            # 1 / width, eps, bound; out, residual, norm, squares; width, tiles, outputs, stride of out,
            # tokens; biases
            "128s128sPPPPPifffPPPPiiiiiP",
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def _inputs(x: ScaledRows, rounded: RoundedRows | None) -> tuple[int, int, int]:
    """Returns the addresses of x, or of what it was rounded to."""
    if rounded is None:
        return x.rows.data_ptr(), 0, 0
    return 0, rounded.factors.data_ptr(), rounded.scales.data_ptr()


def fits(matrix: Matrix) -> bool:
    """Returns whether the kernel supports this matrix."""
    if not isinstance(matrix, Fp8Matrix) or not RoundingArguments.known(matrix.rounding):
        return False
    rows, width = matrix.size
    grouped = RoundingArguments.of(matrix.rounding).grouped
    return (
        matrix.block == ((GROUP, GROUP) if grouped else None)
        and matrix.codes.is_contiguous()
        and matrix.scales.is_contiguous()
        and matrix.scales.dtype is torch.float32
        and not matrix.codes.data_ptr() % 16
        and not matrix.scales.data_ptr() % 16
        and rows % (2 * (16 if grouped else QUAD)) == 0
        and width % 16 == 0
        and (not grouped or width <= MOST_GROUPED_COLUMNS)
    )


def fp8_matrix(matrix: Matrix) -> Fp8Matrix:
    """Returns the matrix. Raises TypeError for another format."""
    if not isinstance(matrix, Fp8Matrix):
        raise TypeError(f"a matrix of FP8 is needed, not one in {matrix.format}")
    return matrix
