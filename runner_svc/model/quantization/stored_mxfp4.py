"""Experts in MXFP4 as gpt-oss has them: NAME_blocks and NAME_scales for the matrices of all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.stored_format import ExpectedTensor, StoredTensors
from runner_svc.weights.matrix_part import ALL, Region, counted

if TYPE_CHECKING:
    from runner_svc.weights.matrix import Matrix

_GROUP = 32


@dataclass(frozen=True, slots=True)
class StoredMxfp4:
    """Sixteen bytes hold 32 adjacent columns of a row, the even ones in the low bits; a scale is a byte."""

    @property
    def name(self) -> str:
        """For logs and refusals."""
        return "MXFP4"

    @property
    def unit(self) -> int:
        """See `StoredFormat`."""
        return _GROUP

    def stacked(self, module: str, count: int, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Yields the tensors of `count` matrices [rows, columns]."""
        if columns % _GROUP:
            raise UnsupportedModel(f"{module} has {columns} columns, not a multiple of {_GROUP}, and can't be MXFP4.")
        groups = columns // _GROUP
        yield ExpectedTensor(f"{module}_blocks", ((count, rows, groups, _GROUP // 2),), ("U8",))
        yield ExpectedTensor(f"{module}_scales", ((count, rows, groups),), ("U8",))

    def read_stack(self, module: str, stored: StoredTensors, region: Region = ALL) -> Matrix:
        """Returns the rows of all matrices, or of a region of each, beneath each other.

        Raises UnsupportedModel for a scale that is NaN.
        """
        from runner_svc.weights.blocks.mxfp4_matrix import NOT_A_NUMBER, Mxfp4Matrix

        groups = counted(region.columns, _GROUP)
        scales = stored.part(f"{module}_scales", None, region.rows, groups).flatten(0, 1)
        if bool((scales == NOT_A_NUMBER).any()):
            raise UnsupportedModel(f"The checkpoint's {module}_scales has a scale that is not a number.")
        return Mxfp4Matrix(stored.part(f"{module}_blocks", None, region.rows, groups).flatten(0, 1).flatten(1), scales)

    def tensors(self, module: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Raises UnsupportedModel: only matrices of experts are stored so."""
        raise UnsupportedModel(f"By the model's 'quantization_config', {module!r} is in MXFP4; only experts may be.")

    def units(self, rows: int, columns: int) -> tuple[int, int]:
        """See `StoredFormat`."""
        return 1, _GROUP

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors, region: Region = ALL) -> Matrix:
        """Raises UnsupportedModel; see `tensors`."""
        raise UnsupportedModel(f"{module!r} can't be in MXFP4: only experts may be.")
