"""Compiles the products of a canonical decoder, and looks whether their bits depend on the number of rows here.

A check can show a fault, not the absence of one. It compares as integers: rows alone and among others, at other places,
by all kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic.known_numbers import known_numbers
from runner_svc.interface.products.canonical_launchers import ROW_TILE, CanonicalLauncher, NormedRows, Planned
from runner_svc.weights.linear_weights import LinearWeights
from runner_svc.weights.matrix import Matrix

FEW = (1, 5, 16, 30, 64, 100)
MOST_ROWS = 2048
"""Most rows of products that are compared; those of more are compiled."""
_STEP = 64
OUTPUT, DOWN = "the output product", "the down product"
_NOT_NORMED = (OUTPUT, DOWN)
"""Products whose input has no norm."""

Run = Callable[[NormedRows], Sequence[Tensor]]
"""Multiplies rows; returns outputs with as many rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """The linear parts of a layer, and the head; None: the model has none."""

    qkv: LinearWeights
    output: LinearWeights
    gate_up: LinearWeights | None
    down: LinearWeights | None
    head: LinearWeights
    router: LinearWeights | None = None
    divided: bool = False
    """Whether ranks add up the output and down products, which are then stored."""


class ProductCheck:
    """Compares the products of a model over numbers of rows."""

    def __init__(self, products: CanonicalLauncher, stream: int, max_tokens: int, device: torch.device) -> None:
        """`stream` is torch's current one. `max_tokens`: most rows of a pass."""
        self._products, self._stream, self._device = products, stream, device
        self._max_tokens, self._most = max_tokens, min(max_tokens, MOST_ROWS)
        self._weight = torch.empty(0)

    def digest(self, matrices: Checked) -> bytes:
        """Returns a digest of the products' bits. Raises UnusableSettings if they depend on the number of rows."""
        self._weight = known_numbers(matrices.output.size[0], seed=1).bfloat16().to(self._device)
        adding: Literal["store", "add"] = "store" if matrices.divided else "add"
        named: dict[str, tuple[Literal["store", "gated", "add"], LinearWeights | None, torch.dtype]] = {
            "the QKV product": ("store", matrices.qkv, torch.bfloat16),
            OUTPUT: (adding, matrices.output, torch.bfloat16),
            "the gate-up product": ("gated", matrices.gate_up, torch.bfloat16),
            DOWN: (adding, matrices.down, torch.bfloat16),
            "the router's product": ("store", matrices.router, torch.float32),
            "the head's product": ("store", matrices.head, torch.float32),
        }
        products = {
            name: Planned(kind, linear.matrix, out, linear.bias is not None)
            for name, (kind, linear, out) in named.items()
            if linear is not None
        }
        by_most: dict[int, list[Planned]] = {}
        for product in products.values():
            by_most.setdefault(self._most_of(product, matrices), []).append(product)
        for most, some in by_most.items():
            rows = self._max_tokens if most == self._most else most
            self._products.compile(some, sorted({ROW_TILE, *(count for _, count in _parts(rows))}))
        digest = hashlib.blake2b(digest_size=16)
        for name, product in products.items():
            for part in self._compared(name, product, self._most_of(product, matrices)):
                digest.update(part)
        return digest.digest()

    def _most_of(self, product: Planned, matrices: Checked) -> int:
        return min(self._most, 4 * ROW_TILE) if product.matrix is matrices.head.matrix else self._most

    def _compared(self, name: str, product: Planned, most: int) -> Iterator[bytes]:
        """Yields the bits of the first row."""
        matrix, run = product.matrix, self._run_of(product)
        rows = known_numbers(max(most, FEW[-1]), matrix.size[1], seed=matrix.size[0]).bfloat16().to(self._device)

        def taken(begin: int, count: int) -> NormedRows:
            own = rows[begin : begin + count]
            if name in _NOT_NORMED:
                return NormedRows(own, None)
            return self._products.take(self._stream, own, None, self._weight, None, torch.empty_like(own))

        wanted = [torch.cat(parts) for parts in zip(*(run(taken(*part)) for part in _tiles(len(rows))), strict=True)]
        for begin, count in _parts(most):
            for one, other in zip(run(taken(begin, count)), wanted, strict=True):
                if not _same(one, other[begin : begin + count]):
                    raise UnusableSettings(
                        f"deterministic is true, but on this GPU the bits of {name} depend on the number of rows "
                        f"({count} differ): set deterministic to false"
                    )
        return (each[:1].contiguous().view(torch.uint8).cpu().numpy().tobytes() for each in wanted)

    def _run_of(self, product: Planned) -> Run:
        matrix, bias = product.matrix, None
        if product.has_bias:
            bias = known_numbers(1, matrix.size[0], seed=2)[0].bfloat16().to(self._device)
        if product.kind == "store":
            return self._stored(matrix, bias, product.out)
        return self._gated(matrix, bias) if product.kind == "gated" else self._added(matrix, bias)

    def _empty(self, rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(rows, width, dtype=dtype, device=self._device)

    def _stored(self, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Run:
        def run(x: NormedRows) -> Sequence[Tensor]:
            out = self._empty(len(x.rows), matrix.size[0], dtype)
            self._products.store(self._stream, x, matrix, out, bias)
            return [out]

        return run

    def _gated(self, matrix: Matrix, bias: Tensor | None) -> Run:
        def run(x: NormedRows) -> Sequence[Tensor]:
            out = self._empty(len(x.rows), matrix.size[0] // 2)
            self._products.gated(self._stream, x, matrix, out, bias)
            return [out]

        return run

    def _added(self, matrix: Matrix, bias: Tensor | None) -> Run:
        def run(x: NormedRows) -> Sequence[Tensor]:
            residual, out = (self._empty(len(x.rows), matrix.size[0]) for _ in range(2))
            following = self._products.add(self._stream, x, matrix, residual, self._weight, out, bias)
            assert following.squares is not None
            return [residual, out, following.squares.transpose(1, 2).flatten(0, 1)[: len(out)].clone()]

        return run


def _tiles(count: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(ROW_TILE, count - begin)) for begin in range(0, count, ROW_TILE))


def _parts(most: int) -> Iterator[tuple[int, int]]:
    """Yields rows to compute at once, by their first and number."""
    for place, count in enumerate(FEW):
        yield min(17 * place, max(most, FEW[-1]) - count), count
    for count in range(ROW_TILE + _STEP, most + 1, _STEP):
        yield 0, count


def _same(one: Tensor, other: Tensor) -> bool:
    kind = torch.int16 if one.dtype is torch.bfloat16 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))
