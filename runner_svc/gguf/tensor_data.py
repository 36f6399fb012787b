"""Reads tensors from GGUF files and writes them as safetensors, a few megabytes at a time.

Matrices are written as numbers, or in blocks: the bytes of each row as they lie in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from runner_svc.gguf.header import TensorInfo
from runner_svc.gguf.tensor_types import Dtype
from runner_svc.interface.progress import Progress

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# The most bytes of a file, and about the most elements in memory at a time.
SHARD_BYTES = 5_000_000_000
_CHUNK_ELEMENTS = 1 << 21
BLOCKS = "blocks"
"""What the name of a matrix in blocks ends in, in place of "weight"."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a written tensor."""

    shape: tuple[int, ...]
    source: TensorInfo | None
    """None for zeros."""
    permuted_heads: int | None = None
    """The number of heads whose rows are stored as pairs (0, half, 1, half + 1, ...) and are written as halves."""
    added: float = 0.0
    """What is added to each number."""
    are_blocks: bool = False
    """Whether the bytes of its rows are written; only of a matrix, to whose numbers nothing is added."""

    @property
    def dtype(self) -> Dtype:
        """Returns the data type that holds its numbers exactly; U8 for blocks."""
        if self.are_blocks:
            return Dtype.U8
        return Dtype.F32 if self.source is None or self.added else self.source.type.dtype

    @property
    def written_row(self) -> tuple[int, ...]:
        """Returns the shape of a written row, in numbers or in bytes."""
        if self.are_blocks and self.source is not None:
            return (self.source.num_bytes // self.shape[0],)
        return self.shape[1:]


@dataclass(frozen=True, slots=True)
class Target:
    """A written tensor: pieces, one below the other."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def module(self) -> str:
        """Returns the name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def block_type(self) -> str | None:
        """Returns the type of its blocks; None for numbers."""
        piece = self.pieces[0]
        return piece.source.type.name if piece.are_blocks and piece.source is not None else None

    def as_blocks(self, types: Iterable[str]) -> Target:
        """Returns the target in blocks; unchanged unless all its pieces are of the same one of these types."""
        found = {piece.source.type.name if piece.source is not None else "" for piece in self.pieces}
        if len(found) > 1 or not found <= set(types) or any(piece.added for piece in self.pieces):
            return self
        return Target(f"{self.module}.{BLOCKS}", tuple(replace(piece, are_blocks=True) for piece in self.pieces))

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of all pieces together."""
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].written_row)

    @property
    def dtype(self) -> Dtype:
        """Returns the data type of the pieces, or float32 if they differ."""
        dtypes = {piece.dtype for piece in self.pieces}
        return dtypes.pop() if len(dtypes) == 1 else Dtype.F32

    @property
    def num_bytes(self) -> int:
        """Returns the size of its content as written."""
        return math.prod(self.shape) * self.dtype.num_bytes


def read_tensor(info: TensorInfo) -> NDArray[np.float32]:
    """Returns a small tensor in float32."""
    with info.file.open("rb") as file:
        file.seek(info.offset)
        numbers: NDArray[np.float32] = info.type.numbers(file.read(info.num_bytes), Dtype.F32)
    return numbers.reshape(info.shape)


def write_tensors(targets: list[Target], folder: Path, progress: Progress, what: str) -> None:
    """Writes the tensors to `folder` as one safetensors file, or as an index and shards of at most `SHARD_BYTES`."""
    shards = _shards(targets)
    total = sum(target.num_bytes for target in targets)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(_safetensors_header(shard))
            for target in shard:
                for chunk in _chunks(target):
                    file.write(chunk.data)
                    done += len(chunk)
                    progress(what, done / total)
        weight_map |= dict.fromkeys((target.name for target in shard), name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _shards(targets: list[Target]) -> list[list[Target]]:
    shards: list[list[Target]] = [[]]
    size = 0
    for target in targets:
        if shards[-1] and size + target.num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += target.num_bytes
    return shards


def _safetensors_header(targets: list[Target]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets:
        end = offset + target.num_bytes
        header[target.name] = {"dtype": target.dtype, "shape": target.shape, "data_offsets": [offset, end]}
        offset = end
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def _chunks(target: Target) -> Iterator[NDArray[np.uint8]]:
    for piece in target.pieces:
        if piece.source is None:
            yield np.zeros(math.prod(piece.shape) * target.dtype.num_bytes, np.uint8)
            continue
        with piece.source.file.open("rb") as file:
            yield from _piece_chunks(file, piece, piece.source, target.dtype)


def _piece_chunks(file: BinaryIO, piece: Piece, source: TensorInfo, dtype: Dtype) -> Iterator[NDArray[np.uint8]]:
    columns = math.prod(piece.written_row)
    row_bytes = source.num_bytes // piece.shape[0]  # of a vector: none, as many share a block
    unit = piece.shape[0] // (piece.permuted_heads or piece.shape[0])  # rows that are reordered together
    # The rows of a vector are single numbers, of which a block has many: it is read as a whole.
    rows_read = unit * max(1, _CHUNK_ELEMENTS // (columns * unit)) if len(piece.shape) > 1 else piece.shape[0]
    for first in range(0, piece.shape[0], rows_read):
        rows = min(rows_read, piece.shape[0] - first)
        file.seek(source.offset + first * row_bytes)
        numbers = source.type.numbers(file.read(rows * row_bytes if len(piece.shape) > 1 else source.num_bytes), dtype)
        if piece.permuted_heads is not None:
            pairs = numbers.reshape(rows // unit, unit // 2, 2, columns)
            numbers = np.ascontiguousarray(pairs.swapaxes(1, 2))
        if piece.added:
            numbers = numbers + np.float32(piece.added)
        yield numbers.reshape(-1).view(np.uint8)
