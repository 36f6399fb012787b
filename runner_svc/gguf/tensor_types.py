"""The types of tensors in GGUF files, and the dequantization of their blocks.

Numbers are bit for bit those of the package `gguf`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner_svc.gguf.errors import GgufError

# Blocks that are dequantized as one row: gguf works on groups of 16 rows, and is fastest with this many.
_BLOCKS_PER_ROW = 64


class Dtype(StrEnum):
    """Data types of written tensors, as safetensors names them."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    U8 = "U8"
    """Bytes of blocks."""

    @property
    def num_bytes(self) -> int:
        """Returns the size of one element."""
        return {Dtype.F32: 4, Dtype.U8: 1}.get(self, 2)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of ggml: its code in files, its name, and elements and bytes of a block."""

    code: int
    name: str
    block_elements: int
    block_bytes: int

    @property
    def dtype(self) -> Dtype:
        """Returns the data type that holds its numbers exactly."""
        return Dtype(self.name) if self.name in ("F32", "F16", "BF16") else Dtype.F32

    def numbers(self, content: Any, dtype: Dtype) -> NDArray[Any]:
        """Returns the numbers of any count of whole blocks, flat.

        They are float32. For a `dtype` of 16 bits, which must be the stored one, they are the bits as uint16. For U8
        they are the bytes themselves.
        """
        if dtype is Dtype.U8:
            return np.frombuffer(content, np.uint8)
        if dtype is not Dtype.F32:
            return np.frombuffer(content, np.uint16)
        if self.name == "F32":
            return np.frombuffer(content, np.float32)
        blocks = np.frombuffer(content, np.uint8).reshape(-1, self.block_bytes)
        whole = len(blocks) // _BLOCKS_PER_ROW * _BLOCKS_PER_ROW
        parts = [blocks[:whole].reshape(-1, _BLOCKS_PER_ROW * self.block_bytes), blocks[whole:].reshape(1, -1)]
        return np.concatenate([self._dequantized(part) for part in parts if part.size])

    def _dequantized(self, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # of scales that are infinite
            return dequantize(rows, _known()[self.code].ggml).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Known:
    ggml: Any
    type: TensorType
    is_read: bool


def tensor_type(code: int, tensor: str) -> TensorType:
    """Returns the type with that code. Raises GgufError if gguf does not know it or cannot dequantize it."""
    known = _known().get(code)
    if known is not None and known.is_read:
        return known.type
    name = f"{known.type.name}" if known is not None else f"the unknown type {code}"
    read = ", ".join(one.type.name for one in _known().values() if one.is_read)
    raise GgufError(f"Tensor {tensor!r} is stored as {name}, which can't be read; types that can: {read}.")


@cache
def _known() -> dict[int, _Known]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    known = {}
    for ggml in GGMLQuantizationType:
        elements, size = GGML_QUANT_SIZES[ggml]
        try:
            dequantize(np.zeros((1, size), np.uint8), ggml)
            is_read = True
        except NotImplementedError:
            is_read = False
        known[ggml.value] = _Known(ggml, TensorType(ggml.value, ggml.name, elements, size), is_read)
    return known
