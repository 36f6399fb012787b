"""Formats that plain weights can get while they are loaded, a matrix at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from runner_svc.weights.fp8_matrix import to_fp8, to_fp8_blocks
from runner_svc.weights.int4_matrix import to_int4
from runner_svc.weights.matrix import Matrix, joined

_GROUPS = (128, 64, 32)
_TILE_ROWS = 8192


@dataclass(frozen=True, slots=True)
class OnLoad:
    """What of a plain checkpoint is quantized."""

    layers: str = "none"
    """The runner's setting `quantization`: the format of the layers' matrices."""
    head: bool = False
    """Whether the head is held in FP8."""

    @property
    def name(self) -> str:
        """For logs and fingerprints; "" for nothing."""
        parts = [self.layers] if self.layers != "none" else []
        return " with ".join([*parts, *(["head in fp8"] if self.head else [])])

    def layer_matrix(self, matrix: Matrix) -> Matrix:
        """Returns a plain matrix of a layer in its format."""
        return ON_LOAD[self.layers](matrix) if self.layers != "none" else matrix

    def head_matrix(self, matrix: Matrix) -> Matrix:
        """Returns the plain head in its format."""
        return quantize_fp8(matrix) if self.head else matrix


NOTHING = OnLoad()


def quantize_fp8(matrix: Matrix) -> Matrix:
    """Returns the matrix in FP8 per channel, with activations per token."""
    return joined([to_fp8(part) for part in _tiles(matrix)])


def quantize_fp8_blocks(matrix: Matrix) -> Matrix:
    """Returns the matrix in FP8 in blocks of 128 x 128, with activations per token and 128 columns."""
    return joined([to_fp8_blocks(part) for part in _tiles(matrix)])


def quantize_int4(matrix: Matrix) -> Matrix:
    """Returns the matrix in int4, in the largest groups of 128, 64 or 32 columns that divide it."""
    columns = matrix.size[1]
    group = next((group for group in _GROUPS if columns % group == 0), _GROUPS[-1])
    return joined([to_int4(part, group) for part in _tiles(matrix)])


def _tiles(matrix: Matrix) -> Iterator[Tensor]:
    """Yields some rows at a time: quantizing takes several float32 copies of them."""
    rows, columns = matrix.size
    for begin in range(0, rows, _TILE_ROWS):
        yield matrix.cut(slice(begin, min(begin + _TILE_ROWS, rows)), slice(0, columns)).dequantized()


ON_LOAD: dict[str, Callable[[Matrix], Matrix]] = {
    "fp8": quantize_fp8,
    "fp8-block": quantize_fp8_blocks,
    "int4": quantize_int4,
}
"""By the value of the runner's setting `quantization`."""
