"""cuBLASLt's products by an algorithm of one's choice, of the library that torch has loaded.

torch takes the first algorithm that the library's heuristic names. For products of 100 to 1,000 rows others are often
faster: the last round of tiles decides, and the heuristic counts it roughly. Row-major x W^T is the library's
column-major W^T-transposed times x.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 << 20

_DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_FLOAT32, _COMPUTE_32F = 0, 68
_TRANSPOSE_A, _NO, _YES = 3, 0, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N, CUBLAS_OP_T
_MAX_WORKSPACE, _REDUCTIONS = 1, 3  # of cublasLtMatmulPreferenceAttributes_t
_SUMS_IN_FLOAT32 = 2
"""CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of a product are added in float32 and in a fixed order."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasError(RuntimeError):
    """A call of the library failed."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute a product."""

    words: bytes
    """cublasLtMatmulAlgo_t."""
    workspace: int
    """Bytes that it needs."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """out [rows, outputs] = x [rows, width] W^T, or += if `adding`; the stride of the rows of `out` is `stride`."""

    rows: int
    outputs: int
    width: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    stride: int
    adding: bool


class LtProduct:
    """The products of one shape."""

    def __init__(self, shape: ProductShape) -> None:
        """Raises CublasError, and OSError if the library is not there."""
        self.shape = shape
        self._library = library = _library()
        self._handle = _handle()
        self._description = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self._description), _COMPUTE_32F, _FLOAT32))
        yes = ctypes.c_int32(_YES)
        _check(
            library.cublasLtMatmulDescSetAttribute(
                self._description, _TRANSPOSE_A, ctypes.byref(yes), ctypes.sizeof(yes)
            )
        )
        numbers, out = _DATA_TYPES[shape.dtype], _DATA_TYPES[shape.out_dtype]
        self._weight = _layout(numbers, shape.width, shape.outputs, shape.width)
        self._x = _layout(numbers, shape.width, shape.rows, shape.width)
        self._out = _layout(out, shape.outputs, shape.rows, shape.stride)
        self._beta = ctypes.c_float(1.0 if shape.adding else 0.0)

    def algorithms(self, most: int) -> list[Algorithm]:
        """Returns up to `most` algorithms, those first that the library expects to be fast."""
        library, preference = self._library, ctypes.c_void_p()
        _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        for attribute, value in (
            (_MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE_BYTES)),
            (_REDUCTIONS, ctypes.c_uint32(_SUMS_IN_FLOAT32)),
        ):
            _check(
                library.cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
                )
            )
        found, count = (_Heuristic * most)(), ctypes.c_int()
        layouts = (self._weight, self._x, self._out, self._out)
        _check(
            library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._description, *layouts, preference, most, found, ctypes.byref(count)
            )
        )
        _check(library.cublasLtMatmulPreferenceDestroy(preference))
        return [Algorithm(bytes(each.algorithm), each.workspace) for each in found[: count.value] if each.status == 0]

    def launch(
        self,
        stream: int,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        algorithm: Algorithm,
        workspace: Tensor,
        factor: float = 1.0,
    ) -> None:
        """Launches the product, times `factor`. Raises CublasError if the algorithm does not fit."""
        alpha = ctypes.c_float(factor)
        _check(
            self._library.cublasLtMatmul(
                self._handle,
                self._description,
                ctypes.byref(alpha),
                weight.data_ptr(),
                self._weight,
                x.data_ptr(),
                self._x,
                ctypes.byref(self._beta),
                out.data_ptr(),
                self._out,
                out.data_ptr(),
                self._out,
                algorithm.words,
                workspace.data_ptr(),
                workspace.numel() * workspace.element_size(),
                stream,
            )
        )


def _layout(kind: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    size = ctypes.c_uint64
    _check(
        _library().cublasLtMatrixLayoutCreate(
            ctypes.byref(layout), kind, size(rows), size(columns), ctypes.c_int64(stride)
        )
    )
    return layout


@cache
def _library() -> ctypes.CDLL:
    """Returns the library that torch has loaded."""
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    paths = sorted(path for path in mapped if "libcublasLt.so" in path)
    library = ctypes.CDLL(paths[0] if paths else f"libcublasLt.so.{(torch.version.cuda or '13').split('.')[0]}")
    pointer = ctypes.c_void_p
    library.cublasLtMatmul.argtypes = [
        *(pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer, pointer),
        *(ctypes.c_char_p, pointer, ctypes.c_size_t, pointer),
    ]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [
        *(pointer, pointer, pointer, pointer, pointer, pointer, pointer),
        *(ctypes.c_int, pointer, pointer),
    ]
    return library


@cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise CublasError(f"cuBLASLt returned status {status}")


def product_shapes(x: Tensor, weight: Tensor, out: Tensor, *, adding: bool) -> ProductShape:
    """Returns the shape of a product of contiguous x and weights."""
    return ProductShape(len(x), len(weight), x.shape[1], x.dtype, out.dtype, out.stride(0), adding)


__all__: Sequence[str] = ("Algorithm", "CublasError", "LtProduct", "ProductShape", "product_shapes")
