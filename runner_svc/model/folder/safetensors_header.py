"""Reads what a safetensors file says of its tensors, without the tensors: 8 bytes of length, then a JSON header.

The format is documented at https://github.com/huggingface/safetensors#format. Needs no torch, so that
`roster models` can ask whether a folder is whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from runner_svc.model.folder.errors import BrokenModel
from runner_svc.model.folder.json_file import AGAIN, refuse_pointer, refuse_unreadable

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as in the safetensors library

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element of each dtype that weights may have."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    path: Path
    dtype: str
    """As safetensors names it: F32, BF16, ..."""
    shape: tuple[int, ...]
    begin: int = 0
    """Place of its first byte in the file."""
    num_bytes: int = 0


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file, by name.

    Raises BrokenModel for a file that is an LFS pointer, is cut off, or has another format.
    """
    refuse_unreadable(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        beginning = file.read(64)
        refuse_pointer(path, beginning)
        if len(beginning) < _LENGTH_BYTES:
            raise BrokenModel(f"{path} is cut off after {size} bytes, within the length of its header: {AGAIN}.")
        length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
        if length > _MOST_HEADER_BYTES:
            raise BrokenModel(f"{path} is not a safetensors file: {AGAIN}, or convert it to safetensors.")
        if _LENGTH_BYTES + length > size:
            raise BrokenModel(f"{path} is cut off after {size} bytes, within its header: {AGAIN}.")
        file.seek(_LENGTH_BYTES)
        header = _header(path, file.read(length))
    tensors, end = _tensors(path, header, _LENGTH_BYTES + length)
    data_bytes = size - _LENGTH_BYTES - length
    if end > data_bytes:
        raise BrokenModel(f"{path} is cut off: it has {data_bytes} bytes of tensors in place of {end}: {AGAIN}.")
    if end < data_bytes:
        raise BrokenModel(f"{path} has {data_bytes - end} bytes behind its last tensor: {AGAIN}.")
    return tensors


def _header(path: Path, content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path} is not a safetensors file: its header is not JSON: {AGAIN}.") from error
    if not isinstance(header, dict):
        raise BrokenModel(f"{path} is not a safetensors file: its header is not an object: {AGAIN}.")
    header.pop("__metadata__", None)
    return header


def _tensors(path: Path, header: dict[str, Any], first: int) -> tuple[dict[str, StoredTensor], int]:
    """Returns the tensors, and the number of bytes that they take from byte `first` on."""
    tensors, extents = {}, []
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(map(_count, entry["shape"])), entry["data_offsets"]
            extents.append((_count(begin), _count(end)))
        except (TypeError, ValueError, KeyError) as error:
            raise BrokenModel(f"{path} has a broken entry for tensor {name!r} in its header: {AGAIN}.") from error
        if dtype in ELEMENT_BYTES and prod(shape) * ELEMENT_BYTES[dtype] != end - begin:
            raise BrokenModel(f"{path} has {end - begin} bytes for tensor {name!r}, {dtype} {shape}: {AGAIN}.")
        tensors[name] = StoredTensor(path, str(dtype), shape, first + begin, end - begin)
    reached = 0
    for begin, end in sorted(extents):
        if begin != reached or end < begin:
            raise BrokenModel(f"{path} has tensors that overlap or leave a gap at byte {reached}: {AGAIN}.")
        reached = end
    return tensors, reached


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value
