"""A format as a checkpoint holds it: which tensors a matrix has, and how they become one of `runner_svc.weights`.

Needs no torch before a matrix is read, so that folders are judged without it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runner_svc.weights.matrix_part import ALL, Region

if TYPE_CHECKING:
    from torch import Tensor

    from runner_svc.weights.matrix import Matrix

Shape = tuple[int, ...]
SCALE_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor of a matrix; any of the shapes, and any of safetensors' types."""

    name: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    required: bool = True


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of a checkpoint."""

    names: Container[str]
    read: Callable[..., Tensor]
    """Returns a tensor, or slices of its first dimensions, in the type that it is stored in, on the device."""

    def part(self, name: str, *places: slice | None) -> Tensor:
        """Returns what is at those places of the first dimensions; None: at all."""
        if all(each is None for each in places):
            return self.read(name)
        return self.read(name, *(each or slice(None) for each in places))

    def optional(self, name: str) -> Tensor | None:
        """Returns a tensor that may be absent."""
        return self.read(name) if name in self.names else None


class StoredFormat(Protocol):
    """A format, compared by value."""

    @property
    def name(self) -> str:
        """For logs and refusals."""

    @property
    def unit(self) -> int:
        """Rows and columns at whose multiples a matrix can be divided in this format."""

    def tensors(self, module: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Yields the tensors of the matrix [rows, columns] of a module.

        Raises UnsupportedModel for sizes that the format can't have.
        """

    def units(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns at which multiples of rows and of columns `read` can begin and end in a matrix [rows, columns]."""

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors, region: Region = ALL) -> Matrix:
        """Returns a region of the matrix [rows, columns] of a module.

        Raises UnsupportedModel, naming the tensor whose values can't be used.
        """
