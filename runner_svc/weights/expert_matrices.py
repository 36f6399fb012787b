"""One matrix of each expert of a layer, in any format: [experts, out, in]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """Matrices of one size; they may have unlike formats where a checkpoint has it so."""

    matrices: tuple[Matrix, ...]
    whole: Matrix | None
    """The rows of all, one expert beneath the other, of which `matrices` are parts; None if they are not alike."""

    @classmethod
    def plain(cls, weight: Tensor) -> ExpertMatrices:
        """Returns those of a tensor [experts, out, in] in the type that is computed in."""
        return cls.of_rows(PlainMatrix(weight.flatten(0, 1)), len(weight))

    @classmethod
    def of_rows(cls, whole: Matrix, count: int) -> ExpertMatrices:
        """Returns `count` matrices, which lie beneath each other in one. Raises ValueError where it can't be cut."""
        rows, columns = whole.size[0] // count, whole.size[1]
        parts = [whole.cut(slice(index * rows, (index + 1) * rows), slice(0, columns)) for index in range(count)]
        return cls(tuple(parts), whole)

    @classmethod
    def of_each(cls, matrices: Sequence[Matrix]) -> ExpertMatrices:
        """Returns those of the experts in order; alike ones are copied, to lie beneath each other."""
        whole = matrices[0].beneath(list(matrices[1:]))
        return cls(tuple(matrices), None) if whole is None else cls.of_rows(whole, len(matrices))

    @property
    def format(self) -> str:
        """Names of the formats."""
        return " and ".join(dict.fromkeys(matrix.format for matrix in self.matrices))

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts."""
        return sum(matrix.num_bytes for matrix in self.matrices)

    @property
    def weight(self) -> Tensor:
        """The plain matrices, [experts, out, in], for kernels that read no other format.

        Raises TypeError for another format.
        """
        if not isinstance(self.whole, PlainMatrix):
            raise TypeError(f"plain matrices of experts are needed, not ones in {self.format}")
        return self.whole.weight.unflatten(0, (len(self.matrices), -1))

    def dequantized(self, dtype: torch.dtype) -> ExpertMatrices:
        """Returns plain matrices of the same numbers, rounded to `dtype`; itself if it is plain."""
        if isinstance(self.whole, PlainMatrix):
            return self
        first = self.matrices[0].dequantized()
        weight = first.new_empty(len(self.matrices), *first.shape, dtype=dtype)
        weight[0] = first
        for index, matrix in enumerate(self.matrices[1:], 1):
            weight[index] = matrix.dequantized()
        return ExpertMatrices.plain(weight)

    def reordered(self, order: Tensor) -> ExpertMatrices:
        """Returns the rows of each expert in that order, int64 [out]. Raises ValueError where they can't be moved."""
        if self.whole is None:
            return ExpertMatrices.of_each([matrix.reordered(order) for matrix in self.matrices])
        count, rows = len(self.matrices), len(order)
        every = (torch.arange(count, device=order.device).unsqueeze(1) * rows + order).flatten()
        return ExpertMatrices.of_rows(self.whole.reordered(every), count)
