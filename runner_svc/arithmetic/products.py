"""Products with weights whose rows have the same bits whatever rows are multiplied with them.

oneDNN's packed product adds in an order that depends on the weight's size and on the instruction set, but not on the
number of rows or threads. With AVX-512 a single row is an exception, as it has a kernel of its own: it is multiplied
twice. MKL's plain product differs for one to three rows. Both sizes of a weight are padded with zeros to multiples of
16, as other widths have kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic.check import thread_counts
from runner_svc.arithmetic.known_numbers import known_numbers, same_bits
from runner_svc.weights.cpu_products import PACKED_ROWS, can_pack

MOST_ROWS = 2048
"""Rows of one call: the packed product was tried up to this many."""
_UNIT = 16
_TRIED_ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 100)
_ALL_ROWS = 128

_least_rows: dict[tuple[int, int, bool], int] = {}
"""Fewest rows that have the bits of many, by columns of y, columns of x and whether there is a bias."""

Product = Callable[[Tensor], Tensor]


def canonical_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Returns y = x W^T + b, float32 [rows, out], for W [out, in] and b [out].

    Raises UnusableSettings if this torch has no packed product, or one whose bits depend on the number of rows.
    """
    if not can_pack(weight):
        raise UnusableSettings(
            "deterministic is true, but this build of torch has no packed products of oneDNN in float32: install a "
            "build for x86 with oneDNN, or set deterministic to false"
        )
    rows, columns = weight.shape
    padded = functional.pad(weight, (0, -columns % _UNIT, 0, -rows % _UNIT))
    packed = torch.ops.mkldnn._reorder_linear_weight(padded, PACKED_ROWS)
    padded_bias = functional.pad(bias, (0, -rows % _UNIT)) if bias is not None else None

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, padded_bias, "none", [], "")
        return y

    size = (*padded.shape, bias is not None)
    if size not in _least_rows:
        _least_rows[size] = least_rows(multiply, padded.shape[1])
    least, is_padded = _least_rows[size], padded.shape != weight.shape

    def product(x: Tensor) -> Tensor:
        if is_padded:
            x = functional.pad(x, (0, -columns % _UNIT))
        count = len(x)
        if 0 < count < least:
            y = multiply(x.repeat(least, 1))[:count]
        elif count <= MOST_ROWS:
            y = multiply(x)
        else:
            y = torch.cat([product(part) for part in x.split(MOST_ROWS)])
        return y[:, :rows].contiguous() if y.shape[1] != rows else y

    return product


def least_rows(multiply: Product, columns: int) -> int:
    """Returns the fewest rows from which on a row's bits do not depend on their number: 1 or 2.

    Raises UnusableSettings if they always do, or if they depend on the number of threads.
    """
    x = known_numbers(_ALL_ROWS, columns)
    wanted, different = multiply(x), set()
    for _ in thread_counts():
        for count in (*_TRIED_ROWS, _ALL_ROWS):
            for begin in {0, _ALL_ROWS - count, (_ALL_ROWS - count) // 2 | 1}:
                end = begin + count
                if end <= _ALL_ROWS and not same_bits(multiply(x[begin:end]), wanted[begin:end]):
                    different.add(count)
    if different - {1}:
        raise UnusableSettings(
            f"deterministic is true, but on this CPU the bits of a product with {columns} columns depend on the number "
            f"of rows ({', '.join(map(str, sorted(different)))} differ from {_ALL_ROWS}): set deterministic to false"
        )
    return 2 if different else 1
