"""Launches kernels/skinny_product.cu, which multiplies up to 128 rows by a matrix, with norms and activations fused.

Supports only Hopper, and only bfloat16: `x` is multiplied before it is divided by its RMS, and could exceed the range
of float16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.products.skinny_variant import QUAD, STEP, THREADS, TILE_ROWS, SkinnyVariant, num_tiles
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.products.skinny_launchers import RouterParts, ScaledRows, TileSums
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix, plain_tensor

Choose = Callable[[int, int, int], SkinnyVariant]
"""Returns the variant for rows of x, rows and columns of W."""

Key = tuple[SkinnyVariant, str, torch.dtype, int, bool]
"""A kernel: its variant, epilogue, type of outputs, a router's experts, and whether there are biases."""

_TWO_BLOCKS = partial(SkinnyVariant.choose, 2)
# Size of the cache: maps of a model's weights for a few boxes, and of a decoder's workspace.
_MAX_MAPS = 4096


class SkinnyProducts:
    """The products of one model with plain matrices that are contiguous; x has up to 128 rows."""

    def __init__(self, eps: float, activation: str, choose: Choose = _TWO_BLOCKS, *, overlap: bool = False) -> None:
        """`choose` selects variants. Raises KeyError for an unknown activation."""
        self._eps = eps
        self._choose = choose
        self._activation = ACTIVATIONS[activation]
        self._overlap = overlap
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_MAPS)(_matrix_map)

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether the kernel supports this matrix."""
        return isinstance(matrix, PlainMatrix) and fits(matrix.weight)

    def store(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> None:
        """Computes out = norm(x) W^T; `out` is [T, out], bfloat16 or float32.

        The stride of its rows is a multiple of 4. Here and in the other products, `bias` is added to norm(x) W^T, in
        the canonical order alone.
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
        squares = sums.squares[: num_tiles(matrix.size[0])]
        self._launch(stream, "EPILOGUE_RESIDUAL", x, matrix, out, residual, norm_weight, squares, bias=bias)
        return ScaledRows(out, squares)

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
        """As `add`, of one row, and multiplies `out` by `router`, which has up to `MAX_ROUTED` experts."""
        squares = sums.squares[: num_tiles(matrix.size[0])]
        self._launch(stream, "EPILOGUE_RESIDUAL", x, matrix, out, residual, norm_weight, squares, router)
        return ScaledRows(out, squares, logits=router.logits)

    def key(self, epilogue: str, num_tokens: int, size: tuple[int, int], out: torch.dtype, has_bias: bool) -> Key:
        """Returns the key of the kernel for `num_tokens` rows and a matrix of this size."""
        return self._choose(num_tokens, *size), epilogue, out, 0, has_bias

    def compile(self, key: Key) -> None:
        """Compiles a kernel; may be called from any thread."""
        self._kernel(*key)

    def _launch(
        self,
        stream: int,
        epilogue: str,
        x: ScaledRows,
        matrix: Matrix,
        out: Tensor,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        new_squares: Tensor | None = None,
        router: RouterParts | None = None,
        bias: Tensor | None = None,
    ) -> None:
        weight, num_tokens = plain_tensor(matrix), len(x.rows)
        num_rows, width = weight.shape
        variant = self._choose(num_tokens, num_rows, width)
        row_tiles = -(-num_tokens // variant.tokens)
        grid = variant.grid(num_rows, row_tiles, num_multiprocessors())
        box_rows = TILE_ROWS // 2 if epilogue == "EPILOGUE_GATED" else TILE_ROWS
        num_experts = len(router.weight) if router is not None else 0
        self._kernel(variant, epilogue, out.dtype, num_experts, bias is not None)(
            stream,
            grid,
            self._map(weight.data_ptr(), num_rows, width, box_rows),
            self._map(x.rows.data_ptr(), num_tokens, width, variant.tokens),
            address_of(x.squares),
            len(x.squares) if x.squares is not None else 0,
            1.0 / width,
            self._eps,
            out.data_ptr(),
            address_of(residual),
            address_of(norm_weight),
            address_of(new_squares),
            router.weight.data_ptr() if router is not None else 0,
            router.logits.data_ptr() if router is not None else 0,
            width // STEP,
            num_tiles(num_rows),
            out.shape[1],
            out.stride(0),
            num_tokens,
            *((row_tiles, address_of(bias)) if variant.canonical else ()),
        )

    def _compile(
        self, variant: SkinnyVariant, epilogue: str, out: torch.dtype, num_experts: int, has_bias: bool
    ) -> Kernel:
        if has_bias and not variant.canonical:
            raise ValueError("only products in the canonical order add biases")
        defines = variant.defines | {
            "EPILOGUE": epilogue,
            "OUT": DTYPE_DEFINES[out],
            "ACTIVATION": self._activation,
        }
        if num_experts:
            defines["EXPERTS"] = num_experts
        if has_bias:
            defines["BIAS"] = 1
        return Kernel(
            load("skinny_product", defines),
            "skinny_product",
            # maps of weights and x; squares, number, 1 / width, eps; out, residual, norm, squares; router, logits;
            # steps, tiles, outputs, stride of out, tokens; in the canonical order, tiles of tokens and biases
            "128s128sPiffPPPPPPiiiii" + "iP" * variant.canonical,
            THREADS,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def fits(*weights: Tensor) -> bool:
    """Returns whether the kernel supports these matrices."""
    return all(
        weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[0] % (2 * QUAD) == 0
        and weight.shape[1] % STEP == 0
        for weight in weights
    )


def _matrix_map(address: int, rows: int, width: int, box_rows: int) -> bytes:
    return heads_map(address, width // PLANE, PLANE, rows, width, (box_rows, 1), read_once=True)
