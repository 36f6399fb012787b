"""The kernels of products, by the class of the matrix: the one place where a format gets its own.

A format's kernels are a file or a folder here and an entry of `KERNELS`. Whatever an entry lacks is done by launches
that are right for every class: the matrix's own `multiply` and `add`, and no fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from runner_svc.cuda.module import is_hopper, num_multiprocessors
from runner_svc.cuda.products.gated_product import GatedProduct
from runner_svc.cuda.products.gated_variant import GatedVariant
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.interface.products.linear_launchers import GatedLauncher, LinearLauncher
from runner_svc.interface.products.skinny_launchers import ProductLauncher
from runner_svc.weights.matrix import JoinedMatrix, Matrix
from runner_svc.weights.plain_matrix import PlainMatrix


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


KERNELS: Mapping[type[Matrix], MatrixKernels] = {
    PlainMatrix: MatrixKernels(gated=_plain_gated, few_rows=_plain_few_rows),
}


def prepared(matrix: Matrix) -> Matrix:
    """Returns the matrix in the layout that its kernels read; itself if it is in one."""
    if isinstance(matrix, JoinedMatrix):
        return JoinedMatrix(tuple(prepared(part) for part in matrix.parts))
    prepare = KERNELS.get(type(matrix), MatrixKernels()).prepare
    return matrix if prepare is None else prepare(matrix)


def linear_launchers(settings: ProductSettings) -> dict[type[Matrix], LinearLauncher]:
    """Returns the launchers for any number of rows, by class."""
    made = {kind: kernels.linear(settings) for kind, kernels in KERNELS.items() if kernels.linear is not None}
    return {kind: launcher for kind, launcher in made.items() if launcher is not None}


def gated_launchers(settings: ProductSettings) -> dict[type[Matrix], GatedLauncher]:
    """Returns the launchers of gated products for any number of rows, by class."""
    made = {kind: kernels.gated(settings) for kind, kernels in KERNELS.items() if kernels.gated is not None}
    return {kind: launcher for kind, launcher in made.items() if launcher is not None}


def few_row_launchers(settings: ProductSettings, blocks: int) -> dict[type[Matrix], ProductLauncher]:
    """Returns the launchers for few rows, by class."""
    made = {
        kind: kernels.few_rows(settings, blocks) for kind, kernels in KERNELS.items() if kernels.few_rows is not None
    }
    return {kind: launcher for kind, launcher in made.items() if launcher is not None}
