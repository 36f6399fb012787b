"""Launches the kernels that multiply rows by a matrix of 4-bit numbers, by their variants. Only for Hopper.

Norms and activations are fused as in `runner_svc.cuda.products.skinny_product`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.packed_matrix import TILE_ROWS, PackedInt4Matrix, packed_tiles
from runner_svc.cuda.int4.parts_room import PartsRoom
from runner_svc.cuda.int4.stream_variant import StreamVariant
from runner_svc.cuda.int4.wide_variant import WideVariant
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.cuda.tensor_map import PLANE, heads_map
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.weights.matrix import Matrix

Variant = Int4Variant | WideVariant | StreamVariant

Choose = Callable[[int, int, int, int, str], Variant]
"""Returns the variant for rows of x, tiles of W's rows and of its columns, bytes of a tile, and the epilogue."""

_TWO_BLOCKS = partial(Int4Variant.choose, 2)
_MAX_MAPS = 4096


def fits_few_rows(matrix: Matrix) -> bool:
    """Returns whether the kernel supports this matrix."""
    return (
        isinstance(matrix, PackedInt4Matrix)
        and matrix.rows % TILE_ROWS == 0  # of which half are gate and half up
        and matrix.columns % PLANE == 0
    )


class Int4Products:
    """The products of one model, which computes in `dtype`; x has up to 128 rows.

    In float16 only `store` is of use, without a norm's factor: rows that wait for it could exceed the range.
    """

    def __init__(
        self,
        eps: float,
        activation: str,
        choose: Choose = _TWO_BLOCKS,
        *,
        dtype: torch.dtype = torch.bfloat16,
        overlap: bool = False,
        room: PartsRoom | None = None,
    ) -> None:
        """`choose` selects variants; `room` may be shared. Raises KeyError for an unknown activation."""
        self._eps = eps
        self._choose = choose
        self._activation = ACTIVATIONS[activation]
        self._dtype = dtype
        self._overlap = overlap
        self._room = room or PartsRoom()
        self._kernel = lru_cache(None)(self._compile)
        self._map = lru_cache(_MAX_MAPS)(_input_map)

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether the kernel supports this matrix."""
        return fits_few_rows(matrix)

    def store(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        out: Tensor,
        bias: Tensor | None = None,
        *,
        as_most: bool = False,
    ) -> None:
        """Computes out = norm(x) W^T + b; `out` is [T, out], in the model's type or float32.

        The stride of its rows is a multiple of 4. With `as_most` the kernel is that of 128 rows.
        """
        self.launch(stream, "EPILOGUE_STORE", x, matrix, out, bias, as_most=as_most)

    def compile(self, rows: Sequence[int], matrix: PackedInt4Matrix, epilogue: str, out: torch.dtype) -> None:
        """Compiles the kernels of these numbers of rows, so that no step waits for them."""
        for variant in dict.fromkeys(self._variant(num_tokens, matrix, epilogue) for num_tokens in rows):
            self._kernel(variant, epilogue, out, matrix.group, matrix.scale_dtype, matrix.has_zeros)

    def gated(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor, sums: TileSums) -> ScaledRows:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T); the matrix is G above U, `out` is [T, out / 2]."""
        self.launch(stream, "EPILOGUE_GATED", x, matrix, out)
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
    ) -> ScaledRows:
        """Computes residual += norm(x) W^T and out = residual * norm_weight; the next norm's factor is left to `sums`.

        `residual` and `out` are [T, out]. Returns `out` with the sums of squares as the input of the next product.
        """
        variant = self._variant(len(x.rows), packed_tiles(matrix), "EPILOGUE_RESIDUAL")
        squares = sums.squares[: -(-matrix.size[0] // variant.outputs)]
        self.launch(stream, "EPILOGUE_RESIDUAL", x, matrix, out, None, residual, norm_weight, squares)
        return ScaledRows(out, squares)

    def launch(
        self,
        stream: int,
        epilogue: str,
        x: ScaledRows,
        matrix: Matrix,
        out: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        new_squares: Tensor | None = None,
        *,
        as_most: bool = False,
    ) -> None:
        """Launches the kernel with one of its epilogues. Raises TypeError for a matrix in another layout."""
        matrix = packed_tiles(matrix)
        rows = matrix.gathered(x.rows)
        num_tokens, width = rows.shape
        tiles, steps, _ = matrix.tiles.shape
        variant = self._variant(MAX_ROWS if as_most else num_tokens, matrix, epilogue)
        self._kernel(variant, epilogue, out.dtype, matrix.group, matrix.scale_dtype, matrix.has_zeros)(
            stream,
            variant.grid(tiles, num_multiprocessors(), num_tokens),
            *self._inputs(variant, rows),
            matrix.tiles.data_ptr(),
            address_of(x.squares),
            len(x.squares) if x.squares is not None else 0,
            1.0 / width,
            self._eps,
            out.data_ptr(),
            address_of(bias),
            address_of(residual),
            address_of(norm_weight),
            address_of(new_squares),
            steps,
            tiles,
            out.shape[1],
            out.stride(0),
            num_tokens,
            *self._parts(variant, tiles, num_tokens, rows.device),
        )

    def _parts(self, variant: Variant, tiles: int, num_tokens: int, device: torch.device) -> tuple[int, ...]:
        """Returns the kernel's last arguments: where its blocks leave sums for each other."""
        if not isinstance(variant, WideVariant):
            return ()
        if variant.split == 1 and not variant.shares:
            return 0, 0
        blocks = variant.grid(tiles, num_multiprocessors(), num_tokens)
        return self._room.of(blocks * variant.sum_bytes, blocks // variant.split, device)

    def _inputs(self, variant: Variant, rows: Tensor) -> tuple[bytes] | tuple[int, int, int]:
        """Returns the kernel's first arguments, `rows` as it reads them."""
        num_tokens, width = rows.shape
        if isinstance(variant, StreamVariant):
            return rows.data_ptr(), rows.stride(0), width
        return (self._map(rows.data_ptr(), num_tokens, width, rows.stride(0), variant.tokens, variant.planes),)

    def _variant(self, num_tokens: int, matrix: PackedInt4Matrix, epilogue: str) -> Variant:
        tiles, steps, tile_bytes = matrix.tiles.shape
        return self._choose(num_tokens, tiles, steps, tile_bytes, epilogue)

    def _compile(
        self,
        variant: Variant,
        epilogue: str,
        out: torch.dtype,
        group: int,
        scale: torch.dtype,
        has_zeros: bool,
    ) -> Kernel:
        defines = product_defines(variant, epilogue, self._activation, self._dtype, out, group, scale, has_zeros)
        return Kernel(
            load(variant.kernel, defines),
            variant.kernel,
            # x; matrix; squares, number, 1 / width, eps; out, bias, residual, norm, squares; steps, tiles,
            # outputs, stride of out, tokens; room, flags
            variant.inputs + "PPiffPPPPPiiiii" + ("PP" if isinstance(variant, WideVariant) else ""),
            variant.threads,
            shared_bytes=variant.shared_bytes,
            overlap=self._overlap,
        )


def product_defines(
    variant: Variant,
    epilogue: str,
    activation: str,
    dtype: torch.dtype,
    out: torch.dtype,
    group: int,
    scale: torch.dtype,
    has_zeros: bool,
) -> dict[str, int | str]:
    """Returns the source's macros."""
    return variant.defines | {
        "EPILOGUE": epilogue,
        "SCALAR": DTYPE_DEFINES[dtype],
        "OUT": DTYPE_DEFINES[out],
        "ACTIVATION": activation,
        "GROUP": group,
        "SCALE": DTYPE_DEFINES[scale],
        "ZEROS": int(has_zeros),
    }


def _input_map(address: int, rows: int, width: int, stride: int, box_rows: int, planes: int) -> bytes:
    return heads_map(address, width // PLANE, PLANE, rows, stride, (box_rows, planes))
