"""Matrix products on the CPU.

A decode step multiplies few rows with every weight, and a BLAS call then spends as long on repacking the weight as on
multiplying: oneDNN's prepacked product takes about half the time of `torch.nn.functional.linear` at 4 to 32 rows.
torch's inductor uses it for frozen float32 weights. If torch lacks it (another device or build), the plain product is
used. A single row is an exception: its time is that of reading the weight, and the packed product takes up to 1.7 times
as long as the plain one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# Rows that the packed layout is chosen for.
PACKED_ROWS = 16
# Rows of a matrix that are dequantized at a time: with 4,096 columns, 8 MiB.
TILE_ROWS = 512


def plain_product(weight: Tensor, bias: Tensor | None, *, keep_plain: bool) -> Callable[[Tensor], Tensor]:
    """Returns y = x W^T + b for W [out, in]. `keep_plain` keeps the plain copy of a packed weight, for single rows."""
    if not can_pack(weight):
        return lambda x: functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    plain = weight if keep_plain else None

    def product(x: Tensor) -> Tensor:
        if plain is not None and x.shape[0] == 1:
            return functional.linear(x, plain, bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return y

    return product


def tiled_product(
    num_rows: int, tile: Callable[[int, int], Tensor], rounded: Callable[[Tensor], Tensor], bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Returns y = rounded(x) W^T + b, where `tile` returns the numbers of some of W's rows, from one to another."""

    def product(x: Tensor) -> Tensor:
        x = rounded(x)
        y = x.new_empty(len(x), num_rows)
        for begin in range(0, num_rows, TILE_ROWS):
            end = min(begin + TILE_ROWS, num_rows)
            y[:, begin:end] = x @ tile(begin, end).to(x.dtype).t()
        return y if bias is None else y.add_(bias)

    return product


def bfloat16_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns y = x W^T for W [out, in] in bfloat16, which halves what a product reads.

    A CPU that multiplies bfloat16 (AVX-512 or AMX) rounds x and y to it, from which y errs by about 0.3%, and is faster
    than with float32. Others convert some rows at a time to float32.
    """
    if not has_bfloat16():
        return tiled_product(weight.shape[0], lambda begin, end: weight[begin:end], lambda x: x, None)
    return lambda x: functional.linear(x.to(torch.bfloat16), weight).to(x.dtype)


def has_bfloat16() -> bool:
    """Returns whether the CPU has instructions for products in bfloat16."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def int4_product(codes: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Callable[[Tensor], Tensor]:
    """Returns y = x W^T by torch's product with int4 weights, for sizes of which `can_pack_int4` says that it has one.

    `codes` are uint8 [out, in], `scales` and `zeros` float32 [out, groups]. x, scales and y are rounded to bfloat16,
    from which y errs by about 0.3%. It reads the codes as they are packed: with one row, in less than half the time of
    a plain product, and with many in more.
    """
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 2)
    # It computes (code - 8) * scale + offset.
    offsets = (8 - zeros) * scales
    both = torch.stack((scales.t(), offsets.t()), dim=-1).to(torch.bfloat16).contiguous()

    def product(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), packed, group, both)
        return y.to(x.dtype)

    return product


def can_pack_int4(device: torch.device, rows: int, columns: int, group: int) -> bool:
    """Returns whether this torch has a product with int4 weights of these sizes."""
    return (
        device.type == "cpu"
        and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        and hasattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu")
        and group in (32, 64, 128, 256)
        and rows % 16 == 0
        and columns % group == 0
    )


def can_pack(weight: Tensor) -> bool:
    """Returns whether this torch has a prepacked product for the weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
