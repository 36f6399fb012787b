"""Brings a model's matrices into the layouts that the kernels read, and remembers which became plain numbers."""

from __future__ import annotations

from collections import Counter

import torch

from runner_svc.cuda.products.kernels import prepared
from runner_svc.weights.matrix import JoinedMatrix, Matrix
from runner_svc.weights.plain_matrix import PlainMatrix


class Preparing:
    """`prepared` for one model, which computes in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.plain: Counter[str] = Counter()
        """Matrices that became plain, by the format that they had."""
        self._dtype = dtype

    def __call__(self, matrix: Matrix) -> Matrix:
        """Returns the matrix in the layout that its kernels read."""
        made = prepared(matrix, self._dtype)
        if isinstance(matrix, JoinedMatrix) and isinstance(made, JoinedMatrix):
            for before, after in zip(matrix.parts, made.parts, strict=True):
                self._note(before, after)
        else:
            self._note(matrix, made)
        return made

    @property
    def sentence(self) -> str:
        """Says which formats are computed as plain numbers; "" for none."""
        if not self.plain:
            return ""
        return f"as {str(self._dtype).removeprefix('torch.')} on this GPU: {', '.join(sorted(self.plain))}"

    def _note(self, before: Matrix, after: Matrix) -> None:
        if isinstance(after, PlainMatrix) and not isinstance(before, PlainMatrix):
            self.plain[before.format] += 1
