"""The device operations that the canonical order names, by the GPU's own instructions, one at a time.

They are the definition's `Arithmetic` on a GPU: a step of a tensor core adds up as the hardware does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_SOURCE = """
// sums [heads, rows, columns] += left [heads, rows, 16] * right [heads, columns, 16]^T; a block has 16 x 8 sums.
extern "C" __global__ void step_NAME(float* sums, const unsigned* left, const unsigned* right, int rows, int columns) {
    int group = threadIdx.x / 4, pair = threadIdx.x % 4;
    long long head = blockIdx.z, row = blockIdx.y * 16 + group, column = blockIdx.x * 8 + group;
    const unsigned* a = left + (head * rows + row) * 8 + pair;
    const unsigned* b = right + (head * columns + column) * 8 + pair;
    float* c = sums + (head * rows + row) * columns + blockIdx.x * 8 + pair * 2;
    float* d = c + 8 * columns;
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.NAME.NAME.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(d[0]), "+f"(d[1])
        : "r"(a[0]), "r"(a[64]), "r"(a[4]), "r"(a[68]), "r"(b[0]), "r"(b[4]));
}
"""
_FUNCTIONS = """
extern "C" __global__ void exp2_of(float* y, const float* x, long long count) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < count) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(x[i]));
}
extern "C" __global__ void divide(float* y, const float* x, float numerator, long long count) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < count) asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(y[i]) : "f"(numerator), "f"(x[i]));
}
"""


@cache
def _module() -> Any:
    import cupy

    source = _SOURCE.replace("NAME", "bf16") + _SOURCE.replace("NAME", "f16") + _FUNCTIONS
    return cupy.RawModule(code=source, options=("-std=c++17",))


class DeviceArithmetic:
    """The current GPU's operations."""

    def step(self, sums: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Uses mma.sync.m16n8k16; the order of operands and of rows makes no difference."""
        heads, rows, columns = sums.shape
        padded = rows + -rows % 16
        added = functional.pad(sums, (0, 0, 0, padded - rows)).contiguous()
        own, other = functional.pad(left, (0, 0, 0, padded - rows)).contiguous(), right.contiguous()
        name = "step_bf16" if left.dtype is torch.bfloat16 else "step_f16"
        sizes = np.int32(padded), np.int32(columns)
        _launch(name, (columns // 8, padded // 16, heads), 32, (*_addresses(added, own, other), *sizes))
        return added[:, :rows]

    def exp2(self, x: Tensor) -> Tensor:
        """Uses ex2.approx.ftz."""
        own, result = x.contiguous(), torch.empty(x.shape, device=x.device)
        arguments = (*_addresses(result, own), np.int64(own.numel()))
        _launch("exp2_of", (-(-own.numel() // 256), 1, 1), 256, arguments)
        return result

    def divide(self, numerator: float, x: Tensor) -> Tensor:
        """Uses div.approx.ftz."""
        own, result = x.contiguous(), torch.empty(x.shape, device=x.device)
        arguments = (*_addresses(result, own), np.float32(numerator), np.int64(own.numel()))
        _launch("divide", (-(-own.numel() // 256), 1, 1), 256, arguments)
        return result


def _addresses(*tensors: Tensor) -> tuple[np.int64, ...]:
    return tuple(np.int64(tensor.data_ptr()) for tensor in tensors)


def _launch(name: str, grid: tuple[int, int, int], threads: int, arguments: tuple[Any, ...]) -> None:
    import cupy

    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        _module().get_function(name)(grid, (threads, 1, 1), arguments)
