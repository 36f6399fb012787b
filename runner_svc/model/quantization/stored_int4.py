"""int4 matrices in checkpoints, in each of the three layouts of `runner_svc.weights.int4_packing`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.folder.safetensors_header import ELEMENT_BYTES
from runner_svc.model.quantization.stored_format import SCALE_TYPES, ExpectedTensor, StoredTensors
from runner_svc.weights.matrix_part import ALL, Region, counted

if TYPE_CHECKING:
    from torch import Tensor

    from runner_svc.weights.matrix import Matrix


_WORD = 8
"""Codes in an element of int32."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """What the layouts have in common."""

    group: int | None
    """Columns of a group; None: all columns of the matrix."""
    symmetric: bool

    def _group(self, columns: int) -> int:
        return self.group or columns

    def _count(self, columns: int) -> int:
        return -(-columns // self._group(columns))

    def _groups(self, region: Region, columns: int) -> slice | None:
        """Returns those of the region's columns; None: all."""
        return counted(region.columns, self._group(columns)) if self._count(columns) > 1 else None

    @property
    def unit(self) -> int:
        """See `StoredFormat`: at groups, and at whole bytes and words."""
        return math.lcm(self.group or 1, _WORD)

    def _check_zeros(self, zeros: Tensor, module: str) -> None:
        """Refuses zeros of symmetric groups that are not in the middle, which other programs do not even read."""
        from runner_svc.weights.int4_matrix import MIDDLE

        if self.symmetric and not bool((zeros == MIDDLE).all()):
            raise UnsupportedModel(
                f"The checkpoint's {module}.qzeros has other zeros than {MIDDLE}, but its config.json says that groups "
                "are symmetric: correct 'sym' or 'zero_point', or the checkpoint format."
            )

    @property
    def _described(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{kind} groups of {self.group if self.group is not None else 'all columns'}"


@dataclass(frozen=True, slots=True)
class StoredAwq(_Groups):
    """AutoAWQ's gemm layout; NAME.qzeros is there in symmetric checkpoints too."""

    @property
    def name(self) -> str:
        """For logs and refusals."""
        return f"AWQ int4, {self._described}"

    def tensors(self, module: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Yields the tensors of the matrix [rows, columns] of a module."""
        _check_multiple(module, rows, 8, "rows", self.name)
        groups = self._count(columns)
        yield ExpectedTensor(f"{module}.qweight", ((columns, rows // 8),), ("I32",))
        yield ExpectedTensor(f"{module}.qzeros", ((groups, rows // 8),), ("I32",))
        yield ExpectedTensor(f"{module}.scales", ((groups, rows),), SCALE_TYPES)

    def units(self, rows: int, columns: int) -> tuple[int, int]:
        """See `StoredFormat`."""
        return _WORD, self.unit

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors, region: Region = ALL) -> Matrix:
        """Returns a region of the matrix of a module."""
        from runner_svc.weights.int4_matrix import Int4Matrix
        from runner_svc.weights.int4_packing import AWQ_ORDER, pack_pairs, unpack_words

        words, groups = counted(region.rows, _WORD), self._groups(region, columns)
        codes = unpack_words(stored.part(f"{module}.qweight", region.columns, words), 1, AWQ_ORDER).t()
        zeros = unpack_words(stored.part(f"{module}.qzeros", groups, words), 1, AWQ_ORDER).t().contiguous()
        self._check_zeros(zeros, module)
        scales = _checked(stored.part(f"{module}.scales", groups, region.rows), f"{module}.scales").t().contiguous()
        own = codes.shape[1]
        return Int4Matrix(pack_pairs(codes), scales, _unless_middle(zeros), self._group(own), own)


@dataclass(frozen=True, slots=True)
class StoredGptq(_Groups):
    """AutoGPTQ's layout. Version 1 stores zeros less one."""

    version: int = 1
    reordered: bool = False
    """Whether NAME.g_idx may give columns other groups than those of their place (`desc_act`)."""

    @property
    def name(self) -> str:
        """For logs and refusals."""
        return f"GPTQ int4, {self._described}" + (", columns reordered" if self.reordered else "")

    def tensors(self, module: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Yields the tensors of the matrix [rows, columns] of a module."""
        _check_multiple(module, rows, 8, "rows", self.name)
        _check_multiple(module, columns, 8, "columns", self.name)
        groups = self._count(columns)
        yield ExpectedTensor(f"{module}.qweight", ((columns // 8, rows),), ("I32",))
        yield ExpectedTensor(f"{module}.qzeros", ((groups, rows // 8),), ("I32",))
        yield ExpectedTensor(f"{module}.scales", ((groups, rows),), SCALE_TYPES)
        yield ExpectedTensor(f"{module}.g_idx", ((columns,),), ("I32", "I64"), required=self.reordered)
        # AutoGPTQ wrote zeros for modules that have no bias: see `check_stray_biases`.
        yield ExpectedTensor(f"{module}.bias", ((rows,),), tuple(ELEMENT_BYTES), required=False)

    def units(self, rows: int, columns: int) -> tuple[int, int]:
        """See `StoredFormat`; columns that are not in the group of their place are read all."""
        return _WORD, columns if self.reordered else self.unit

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors, region: Region = ALL) -> Matrix:
        """Returns a region of the matrix of a module.

        Raises UnsupportedModel for zeros or a `g_idx` whose meaning is unclear.
        """
        from runner_svc.weights.int4_matrix import Int4Matrix
        from runner_svc.weights.int4_packing import pack_pairs, unpack_words

        words, groups = counted(region.columns, _WORD), self._groups(region, columns)
        codes = unpack_words(stored.part(f"{module}.qweight", words, region.rows), 0).t()
        zeros = stored.part(f"{module}.qzeros", groups, counted(region.rows, _WORD))
        zeros = unpack_words(zeros, 1).t().contiguous()
        if self.version == 1:
            if bool((zeros == 15).any()):
                raise UnsupportedModel(
                    f"The checkpoint's {module}.qzeros has a 15, which readers of GPTQ take for a zero of 0 or of 16: "
                    "store the model with checkpoint_format gptq_v2."
                )
            zeros = zeros + 1
        self._check_zeros(zeros, module)
        scales = _checked(stored.part(f"{module}.scales", groups, region.rows), f"{module}.scales").t().contiguous()
        order, own = self._order(module, columns, stored), codes.shape[1]
        if order is not None:
            codes = codes[:, order]
        return Int4Matrix(pack_pairs(codes), scales, _unless_middle(zeros), self._group(own), own, order)

    def _order(self, module: str, columns: int, stored: StoredTensors) -> Tensor | None:
        """Returns the columns group by group; None if each is in the group of its place."""
        import torch

        groups = stored.optional(f"{module}.g_idx")
        if groups is None:
            return None
        own = torch.arange(columns, device=groups.device) // self._group(columns)
        if torch.equal(groups.long(), own):
            return None
        order = groups.long().argsort(stable=True)
        if not self.reordered or not torch.equal(groups.long()[order], own):
            raise UnsupportedModel(
                f"The checkpoint's {module}.g_idx does not have {self._group(columns)} columns in each group"
                + (", in order, as 'desc_act' false says." if not self.reordered else ".")
            )
        return order


@dataclass(frozen=True, slots=True)
class StoredPacked(_Groups):
    """The layout of compressed-tensors, "pack-quantized"."""

    @property
    def name(self) -> str:
        """For logs and refusals."""
        return f"pack-quantized int4, {self._described}"

    def tensors(self, module: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Yields the tensors of the matrix [rows, columns] of a module."""
        groups = self._count(columns)
        scales: tuple[tuple[int, ...], ...] = ((rows, groups), (rows,)) if groups == 1 else ((rows, groups),)
        yield ExpectedTensor(f"{module}.weight_packed", ((rows, -(-columns // 8)),), ("I32",))
        yield ExpectedTensor(f"{module}.weight_scale", scales, SCALE_TYPES)
        yield ExpectedTensor(f"{module}.weight_shape", ((2,),), ("I64", "I32"))
        if not self.symmetric:
            yield ExpectedTensor(f"{module}.weight_zero_point", ((-(-rows // 8), groups),), ("I32",))

    def units(self, rows: int, columns: int) -> tuple[int, int]:
        """See `StoredFormat`."""
        return _WORD, self.unit

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors, region: Region = ALL) -> Matrix:
        """Returns a region of the matrix. Raises UnsupportedModel if its `weight_shape` is another one."""
        from runner_svc.weights.int4_matrix import Int4Matrix
        from runner_svc.weights.int4_packing import pack_pairs, unpack_words

        shape = stored.read(f"{module}.weight_shape").tolist()
        if shape != [rows, columns]:
            raise UnsupportedModel(
                f"The checkpoint's {module}.weight_shape is {shape}, but by its config.json it should be "
                f"{[rows, columns]}."
            )
        own, groups = _length(region.columns, columns), self._groups(region, columns)
        words = stored.part(f"{module}.weight_packed", region.rows, counted(region.columns, _WORD))
        codes = unpack_words(words, 1)[:, :own]
        scales = _checked(stored.part(f"{module}.weight_scale", region.rows, groups), f"{module}.weight_scale")
        zeros = None
        if not self.symmetric:
            packed = stored.part(f"{module}.weight_zero_point", counted(region.rows, _WORD), groups)
            zeros = unpack_words(packed, 0)[: len(codes)].contiguous()
        return Int4Matrix(pack_pairs(codes), scales.reshape(len(codes), -1).contiguous(), zeros, self._group(own), own)


def _length(places: slice | None, whole: int) -> int:
    return whole if places is None else places.stop - places.start


def _check_multiple(module: str, size: int, unit: int, what: str, name: str) -> None:
    if size % unit:
        raise UnsupportedModel(f"{module} has {size} {what}, not a multiple of {unit}, and can't be {name}.")


def _checked(scales: Tensor, name: str) -> Tensor:
    if not bool(scales.isfinite().all()):
        raise UnsupportedModel(f"The checkpoint's {name} has a scale that is not finite.")
    return scales


def _unless_middle(zeros: Tensor) -> Tensor | None:
    from runner_svc.weights.int4_matrix import MIDDLE

    return None if bool((zeros == MIDDLE).all()) else zeros
