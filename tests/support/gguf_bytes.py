"""Writes GGUF files, broken ones among them: keys and tensors come as lists, and nothing is checked."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True)
class Typed:
    """A value of a type that is not the usual one."""

    code: int
    value: Any


@dataclass
class StoredTensor:
    """A tensor as it lies in a file."""

    shape: tuple[int, ...]
    """The slowest dimension first."""
    type: int
    content: bytes

    @classmethod
    def of(cls, numbers: np.ndarray, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> StoredTensor:
        """Numbers, quantized."""
        if kind == GGMLQuantizationType.BF16:
            bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
            return cls(numbers.shape, kind.value, (bits >> 16).astype(np.uint16).tobytes())
        return cls(numbers.shape, kind.value, quantize(np.ascontiguousarray(numbers, np.float32), kind).tobytes())


@dataclass
class GgufFile:
    """What a file is made of."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Values: bool, int (uint32), float, str, lists of them, or `Typed`."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    more_keys: list[tuple[str, Any]] = field(default_factory=list)
    more_tensors: list[tuple[str, StoredTensor]] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    order: str = "<"

    def copy(self) -> GgufFile:
        """One that can be changed by itself."""
        return GgufFile(dict(self.keys), dict(self.tensors))

    def content(self) -> bytes:
        """The file's bytes."""
        keys = [*self.keys.items(), *self.more_keys]
        tensors = [*self.tensors.items(), *self.more_tensors]
        alignment = self.keys.get("general.alignment", 32)
        alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
        counts = (
            len(tensors) if self.num_tensors is None else self.num_tensors,
            len(keys) if self.num_keys is None else self.num_keys,
        )
        head = self.magic + self._pack("IQQ", self.version, *counts)
        head += b"".join(self._string(name) + self._value(value) for name, value in keys)
        offset = 0
        for name, tensor in tensors:
            dimensions = tensor.shape[::-1]
            head += (
                self._string(name) + self._pack("I", len(dimensions)) + self._pack(f"{len(dimensions)}Q", *dimensions)
            )
            head += self._pack("IQ", tensor.type, offset)
            offset += _padded(len(tensor.content), alignment)
        body = b"".join(tensor.content.ljust(_padded(len(tensor.content), alignment), b"\0") for _, tensor in tensors)
        return head.ljust(_padded(len(head), alignment), b"\0") + body

    def write(self, path: Path) -> Path:
        """Writes the file; returns its path."""
        path.write_bytes(self.content())
        return path

    def _pack(self, kinds: str, *values: Any) -> bytes:
        return struct.pack(self.order + kinds, *values)

    def _string(self, text: str) -> bytes:
        content = text.encode("utf-8", "surrogateescape")
        return self._pack("Q", len(content)) + content

    def _value(self, value: Any) -> bytes:
        code = _code(value)
        value = value.value if isinstance(value, Typed) else value
        if code == ARRAY:
            kind = _code(value[0]) if value else INT32
            kind = INT32 if kind == UINT32 else kind
            return self._pack("IIQ", ARRAY, kind, len(value)) + b"".join(self._scalar(kind, one) for one in value)
        return self._pack("I", code) + self._scalar(code, value)

    def _scalar(self, code: int, value: Any) -> bytes:
        if code == STRING:
            return self._string(value)
        return self._pack(SCALARS.get(code, "I"), value)


def split(file: GgufFile, folder: Path, stem: str, counts: Sequence[int]) -> list[Path]:
    """Writes a file as parts, as gguf-split does; returns their paths. `counts`: the number of tensors of each part."""
    parts, at = [], 0
    names = list(file.tensors)
    for number, count in enumerate(counts):
        keys = {
            "split.no": Typed(2, number),
            "split.count": Typed(2, len(counts)),
            "split.tensors.count": Typed(INT32, len(names)),
        }
        part = GgufFile({**(file.keys if number == 0 else {}), **keys})
        part.tensors = {name: file.tensors[name] for name in names[at : at + count]}
        parts.append(part.write(folder / f"{stem}-{number + 1:05}-of-{len(counts):05}.gguf"))
        at += count
    return parts


def random_blocks(rng: np.random.Generator, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor of random bytes, whose numbers are finite and about as large as a tiny model's weights."""
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (math.prod(shape) // elements, size), np.uint8)
    for at in _HALVES.get(kind.name, ()):
        scales = rng.uniform(0.0005, 0.002, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind.name == "IQ1_M":  # its scale's bits are the upper halves of four bytes
        bits = rng.uniform(0.0005, 0.002, len(blocks)).astype(np.float16).view(np.uint16)
        for part in range(4):
            upper = ((bits >> (4 * part)) & 0xF).astype(np.uint8) << 4
            blocks[:, 49 + 2 * part] = blocks[:, 49 + 2 * part] & 0xF | upper
    if kind.name == "NVFP4":  # four scales of eight bits
        blocks[:, :4] = rng.integers(40, 60, (len(blocks), 4))
    if kind.name == "MXFP4":  # an exponent of two, with a bias of 127
        blocks[:, 0] = rng.integers(117, 121, len(blocks))
    return StoredTensor(shape, kind.value, blocks.tobytes())


_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where the float16 scales of a block lie."""


def _code(value: Any) -> int:
    if isinstance(value, Typed):
        return value.code
    kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING, list: ARRAY}
    return kinds[type(value)]


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
