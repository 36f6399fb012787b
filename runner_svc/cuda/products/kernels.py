"""The kernels of products, by the class of the matrix: the one place where a format gets its own.

A format's kernels are a file or a folder here and an entry of `KERNELS`. Whatever an entry lacks is done by launches
that are right for every class: the matrix's own `multiply` and `add`, and no fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import torch

from runner_svc.cuda.fp8.linear import Fp8Linear
from runner_svc.cuda.fp8.product import Fp8Products
from runner_svc.cuda.fp8.product import fits as fits_fp8
from runner_svc.cuda.fp8.variant import Fp8Variant
from runner_svc.cuda.int4.any_rows import Int4Gated, Int4Linear
from runner_svc.cuda.int4.dequantize import COLUMNS, Workspace
from runner_svc.cuda.int4.few_rows import Int4Products, fits_few_rows
from runner_svc.cuda.int4.offset_matrix import OffsetInt4Linear, OffsetInt4Matrix, with_offsets
from runner_svc.cuda.int4.packed_matrix import PackedInt4Matrix, packed
from runner_svc.cuda.int4.parts_room import PartsRoom
from runner_svc.cuda.int4.timed_variants import timed
from runner_svc.cuda.int4.wide_variant import WideVariant
from runner_svc.cuda.module import is_hopper, num_multiprocessors
from runner_svc.cuda.products.gated_product import GatedProduct
from runner_svc.cuda.products.gated_variant import GatedVariant
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.interface.products.linear_launchers import GatedLauncher, LinearLauncher
from runner_svc.interface.products.skinny_launchers import ProductLauncher
from runner_svc.weights.blocks.gguf_matrix import GgufMatrix
from runner_svc.weights.blocks.int8_matrix import Int8Matrix
from runner_svc.weights.blocks.mxfp4_matrix import Mxfp4Matrix
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.int4_matrix import Int4Matrix
from runner_svc.weights.matrix import JoinedMatrix, Matrix, joined
from runner_svc.weights.plain_matrix import PlainMatrix

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProductSettings:
    """What the products of one model have in common."""

    dtype: torch.dtype
    eps: float
    activation: str
    overlap: bool = False
    """A kernel may start while the previous one finishes."""


@dataclass(frozen=True, slots=True)
class MatrixKernels:
    """The kernels of one class of matrices. Makers return None for a GPU or settings that the kernels lack."""

    prepare: Callable[[Matrix], Matrix] | None = None
    """Returns the matrix in the layout that the kernels read: a class of its own with its own entry.

    It is called once for each matrix, after it was read. The original is freed afterwards. `dequantized` of the new
    class is the layout's test. None: the layout is that of the class.
    """
    linear: Callable[[ProductSettings], LinearLauncher | None] | None = None
    """Any number of rows."""
    gated: Callable[[ProductSettings], GatedLauncher | None] | None = None
    """Any number of rows, gate and up with the activation."""
    replace: Callable[[Matrix, torch.dtype], Matrix] | None = None
    """Returns another matrix with its numbers, plain ones of the type that is computed in or one that has kernels.

    For matrices that have none: their own methods dequantize at every step. Others are returned as they are.
    """
    few_rows: Callable[[ProductSettings, int], ProductLauncher | None] | None = None
    """Up to 128 rows. The second argument is the number of blocks per multiprocessor, by which variants are timed."""


def _plain_gated(settings: ProductSettings) -> GatedLauncher | None:
    if not is_hopper():
        return None
    choose = partial(GatedVariant.choose, num_multiprocessors())
    return GatedProduct(settings.dtype, settings.activation, choose, overlap=settings.overlap)


def _plain_few_rows(settings: ProductSettings, blocks: int) -> ProductLauncher | None:
    if not is_hopper():
        return None
    choose = partial(SkinnyVariant.choose, blocks)
    return SkinnyProducts(settings.eps, settings.activation, choose, overlap=settings.overlap)


def _pack_int4(matrix: Matrix) -> Matrix:
    if not isinstance(matrix, Int4Matrix) or matrix.size[1] % COLUMNS:
        return matrix
    return packed(matrix) or matrix


@lru_cache(1)
def _int4_workspace(dtype: torch.dtype, overlap: bool) -> Workspace:
    return Workspace(dtype, overlap=overlap)


@lru_cache(1)
def _int4_room() -> PartsRoom:
    return PartsRoom()


def _int4_products(settings: ProductSettings) -> Int4Products:
    return Int4Products(settings.eps, settings.activation, dtype=settings.dtype, overlap=settings.overlap)


def _int4_many_rows(settings: ProductSettings) -> Int4Products:
    choose = partial(WideVariant.choose, num_multiprocessors())
    return Int4Products(
        settings.eps, settings.activation, choose, dtype=settings.dtype, overlap=settings.overlap, room=_int4_room()
    )


def _int4_linear(settings: ProductSettings) -> Int4Linear:
    products = (_int4_products(settings), _int4_many_rows(settings)) if is_hopper() else (None, None)
    return Int4Linear(_int4_workspace(settings.dtype, settings.overlap), *products)


def _int4_gated(settings: ProductSettings) -> GatedLauncher | None:
    many_rows = _plain_gated(settings)
    if many_rows is None:
        return None
    workspace = _int4_workspace(settings.dtype, settings.overlap)
    return Int4Gated(workspace, _int4_products(settings), many_rows, _int4_many_rows(settings))


def _int4_few_rows(settings: ProductSettings, blocks: int) -> ProductLauncher | None:
    if not is_hopper() or settings.dtype is not torch.bfloat16:
        return None
    choose = partial(timed, blocks, num_multiprocessors())
    return Int4Products(settings.eps, settings.activation, choose, overlap=settings.overlap, room=_int4_room())


def _plain(matrix: Matrix, dtype: torch.dtype) -> Matrix:
    return PlainMatrix(matrix.dequantized().to(dtype))


def _gguf(matrix: Matrix, dtype: torch.dtype) -> Matrix:
    """Without kernels of few rows, 4-bit numbers would be slower than plain ones."""
    made = with_offsets(matrix, dtype) if isinstance(matrix, GgufMatrix) and is_hopper() else None
    return _plain(matrix, dtype) if made is None or not fits_few_rows(made.packed) else made


def _offset_linear(settings: ProductSettings) -> LinearLauncher:
    return OffsetInt4Linear(_int4_linear(settings))


def _fp8(matrix: Matrix, dtype: torch.dtype) -> Matrix:
    """Kernels multiply codes with codes: plain where they don't fit, and where activations are not rounded."""
    return matrix if fits_fp8(matrix) and is_hopper() and dtype is torch.bfloat16 else _plain(matrix, dtype)


def _fp8_linear(settings: ProductSettings) -> Fp8Linear | None:
    if not is_hopper() or settings.dtype is not torch.bfloat16:
        return None
    return Fp8Linear(settings.eps, settings.activation, torch.device("cuda"), overlap=settings.overlap)


def _fp8_few_rows(settings: ProductSettings, blocks: int) -> ProductLauncher | None:
    if not is_hopper() or settings.dtype is not torch.bfloat16:
        return None
    choose = partial(Fp8Variant.choose, blocks)
    return Fp8Products(settings.eps, settings.activation, choose, overlap=settings.overlap)


KERNELS: Mapping[type[Matrix], MatrixKernels] = {
    PlainMatrix: MatrixKernels(gated=_plain_gated, few_rows=_plain_few_rows),
    GgufMatrix: MatrixKernels(replace=_gguf),
    OffsetInt4Matrix: MatrixKernels(linear=_offset_linear),
    Int8Matrix: MatrixKernels(replace=_plain),
    Mxfp4Matrix: MatrixKernels(replace=_plain),
    Int4Matrix: MatrixKernels(prepare=_pack_int4),
    PackedInt4Matrix: MatrixKernels(linear=_int4_linear, gated=_int4_gated, few_rows=_int4_few_rows),
    Fp8Matrix: MatrixKernels(linear=_fp8_linear, gated=_fp8_linear, few_rows=_fp8_few_rows, replace=_fp8),
}


class _OnDemand(Mapping[type[Matrix], T]):
    """Launchers by class, each made when a matrix of the class first needs it: a plain model makes no others."""

    def __init__(self, makers: Mapping[type[Matrix], Callable[[], T | None]]) -> None:
        self._makers = makers
        self._made: dict[type[Matrix], T | None] = {}

    def __getitem__(self, kind: type[Matrix]) -> T:
        if kind not in self._made:
            self._made[kind] = self._makers[kind]()
        if (launcher := self._made[kind]) is None:
            raise KeyError(kind)
        return launcher

    def __iter__(self) -> Iterator[type[Matrix]]:
        return (kind for kind in self._makers if kind in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def prepared(matrix: Matrix, dtype: torch.dtype = torch.bfloat16) -> Matrix:
    """Returns the matrix in the layout that its kernels read; itself if it is in one.

    `dtype` is the type that is computed in, of what becomes plain.
    """
    if isinstance(matrix, JoinedMatrix):
        parts = [prepared(part, dtype) for part in matrix.parts]
        are_plain = all(isinstance(part, PlainMatrix) for part in parts)
        return joined(parts) if are_plain else JoinedMatrix(tuple(parts))
    if isinstance(matrix, PlainMatrix):
        return matrix
    kernels = KERNELS.get(type(matrix), MatrixKernels())
    if kernels.replace is not None:
        return kernels.replace(matrix, dtype)
    return matrix if kernels.prepare is None else kernels.prepare(matrix)


def linear_launchers(settings: ProductSettings) -> Mapping[type[Matrix], LinearLauncher]:
    """Returns the launchers for any number of rows, by class."""
    return _OnDemand(
        {kind: partial(kernels.linear, settings) for kind, kernels in KERNELS.items() if kernels.linear is not None}
    )


def gated_launchers(settings: ProductSettings) -> Mapping[type[Matrix], GatedLauncher]:
    """Returns the launchers of gated products for any number of rows, by class."""
    return _OnDemand(
        {kind: partial(kernels.gated, settings) for kind, kernels in KERNELS.items() if kernels.gated is not None}
    )


def few_row_launchers(settings: ProductSettings, blocks: int) -> Mapping[type[Matrix], ProductLauncher]:
    """Returns the launchers for few rows, by class."""
    makers = {
        kind: partial(kernels.few_rows, settings, blocks)
        for kind, kernels in KERNELS.items()
        if kernels.few_rows is not None
    }
    return _OnDemand(makers)
