"""A format as a checkpoint holds it: which tensors a matrix has, and how they become one of `runner_svc.weights`.

Needs no torch before a matrix is read, so that folders are judged without it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
    read: Callable[[str], Tensor]
    """Returns a tensor in the type that it is stored in, on the device that is wanted."""

    def optional(self, name: str) -> Tensor | None:
        """Returns a tensor that may be absent."""
        return self.read(name) if name in self.names else None


class StoredFormat(Protocol):
    """A format, compared by value."""

    @property
    def name(self) -> str:
        """For logs and refusals."""

    def tensors(self, module: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Yields the tensors of the matrix [rows, columns] of a module.

        Raises UnsupportedModel for sizes that the format can't have.
        """

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors) -> Matrix:
        """Returns the matrix of a module. Raises UnsupportedModel, naming the tensor whose values can't be used."""
