"""Reads the header of one GGUF file: its keys, and where each tensor lies.

The format is described in ggml: little-endian, a count of tensors and one of keys, the keys with their values, a
table of tensors, and the tensors' bytes. Each length is compared with the bytes that are left before anything is
allocated, so that a broken file costs a sentence and no memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner_svc.gguf.errors import GgufError
from runner_svc.gguf.tensor_types import TensorType, tensor_type

MAGIC = b"GGUF"
_POINTER = b"version https://git-lfs.github.com/spec/"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
# Of a value: its code in the file, and how struct calls it.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Bytes of the shortest key (its name's length, its type, one byte), and of the shortest entry of the tensor table.
_SHORTEST_KEY, _SHORTEST_TENSOR = 13, 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place, shape and type of a tensor."""

    name: str
    shape: tuple[int, ...]
    """The slowest dimension first, as in safetensors."""
    type: TensorType
    file: Path
    offset: int
    """Of its first byte, in the file."""

    @property
    def num_bytes(self) -> int:
        """Returns the size of its content in the file."""
        return math.prod(self.shape) // self.type.block_elements * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The keys of a file and the places of its tensors."""

    file: Path
    keys: dict[str, Any]
    """Values are int, float, bool, str, or lists of one of them."""
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """Reads the header of a file. Raises GgufError if it is not a GGUF file, broken, or has a type that is not read."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            if size == 0:
                raise GgufError("It is empty.")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data, size).header()
    except OSError as error:
        raise GgufError(f"It can't be read: {error.strerror}.") from error


class _Reader:
    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self._file, self._data, self._size = file, data, size
        self._at = 0

    def header(self) -> Header:
        if self._data[: len(_POINTER)] == _POINTER:
            raise GgufError("It is a Git LFS pointer, not the file itself: run 'git lfs pull' in its folder.")
        if self._data[:4] != MAGIC:
            raise GgufError(f"It starts with {self._data[:4]!r}, where a GGUF file has {MAGIC!r}.")
        self._at = 4
        version = self._scalar("I", "its version")
        if version not in _VERSIONS and int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise GgufError("It is big-endian; convert it for a little-endian machine.")
        if version not in _VERSIONS:
            raise GgufError(f"It is of GGUF version {version}; versions 2 and 3 are read.")
        num_tensors, num_keys = self._scalar("Q", "its counts"), self._scalar("Q", "its counts")
        self._check_room(num_keys, _SHORTEST_KEY, "keys")
        self._check_room(num_tensors, _SHORTEST_TENSOR, "tensors")
        keys = self._keys(num_keys)
        table = self._table(num_tensors)
        return Header(self._file, keys, self._placed(table, keys))

    def _keys(self, count: int) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for index in range(count):
            name = self._string(f"the name of key {index}")
            if name in keys:
                raise GgufError(f"The key {name!r} is there twice.")
            keys[name] = self._value(self._scalar("I", repr(name)), name)
        return keys

    def _value(self, code: int, name: str) -> Any:
        if code in _SCALARS:
            return self._scalar(_SCALARS[code], f"the key {name!r}")
        if code == _STRING:
            return self._string(f"the key {name!r}")
        if code != _ARRAY:
            raise GgufError(f"The key {name!r} has a value of an unknown type, {code}.")
        kind = self._scalar("I", f"the key {name!r}")
        count = self._scalar("Q", f"the key {name!r}")
        if kind in _SCALARS:
            self._check_room(count, struct.calcsize("<" + _SCALARS[kind]), f"values of {name!r}")
            values = struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._data, self._at)
            self._at += struct.calcsize(f"<{count}{_SCALARS[kind]}")
            return list(values)
        if kind == _STRING:
            self._check_room(count, 8, f"values of {name!r}")
            return [self._string(f"the key {name!r}") for _ in range(count)]
        raise GgufError(f"The key {name!r} has an array of an unknown type, {kind}.")

    def _table(self, count: int) -> list[tuple[str, tuple[int, ...], TensorType, int]]:
        entries = []
        for index in range(count):
            name = self._string(f"the name of tensor {index}")
            what = f"the entry of tensor {name!r}"
            num_dimensions = self._scalar("I", what)
            if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
                raise GgufError(f"Tensor {name!r} has {num_dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are read.")
            shape = tuple(self._scalar("Q", what) for _ in range(num_dimensions))[::-1]
            if 0 in shape:
                raise GgufError(f"Tensor {name!r} of {list(shape)} is empty.")
            stored = tensor_type(self._scalar("I", what), name)
            if shape[-1] % stored.block_elements:
                raise GgufError(
                    f"Tensor {name!r} has rows of {shape[-1]}, which {stored.name}, in blocks of "
                    f"{stored.block_elements}, can't hold."
                )
            entries.append((name, shape, stored, self._scalar("Q", what)))
        return entries

    def _placed(
        self, table: list[tuple[str, tuple[int, ...], TensorType, int]], keys: dict[str, Any]
    ) -> dict[str, TensorInfo]:
        alignment = keys.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise GgufError(f"Its general.alignment is {alignment!r}, which is no power of two from 8 on.")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end, before = 0, ""
        for name, shape, stored, offset in sorted(table, key=lambda entry: entry[3]):
            info = TensorInfo(name, shape, stored, self._file, start + offset)
            if name in tensors:
                raise GgufError(f"Tensor {name!r} is there twice.")
            if offset % alignment:
                raise GgufError(f"Tensor {name!r} lies at byte {offset}, which is no multiple of {alignment}.")
            if offset < end:
                raise GgufError(f"Tensors {before!r} and {name!r} overlap.")
            end, before = offset + info.num_bytes, name
            if start + end > self._size:
                raise GgufError(
                    f"It is cut off: tensor {name!r} would end at byte {start + end}, but it has {self._size}."
                )
            tensors[name] = info
        return {name: tensors[name] for name, *_ in table}

    def _scalar(self, kind: str, what: str) -> Any:
        size = struct.calcsize("<" + kind)
        if self._at + size > self._size:
            raise GgufError(f"It is cut off within {what}.")
        (value,) = struct.unpack_from("<" + kind, self._data, self._at)
        self._at += size
        return value

    def _string(self, what: str) -> str:
        length = self._scalar("Q", what)
        if self._at + length > self._size:
            raise GgufError(f"It is cut off within {what}, which has {length} bytes.")
        content = self._data[self._at : self._at + length]
        self._at += length
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(f"It has bytes in {what} that are no UTF-8.") from error

    def _check_room(self, count: int, size: int, what: str) -> None:
        if count * size > self._size - self._at:
            raise GgufError(
                f"It is cut off: it says that it has {count} {what}, but {self._size} bytes can't hold them."
            )
