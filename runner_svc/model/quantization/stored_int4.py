"""int4 matrices in checkpoints, in each of the three layouts of `runner_svc.weights.int4_packing`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.stored_format import SCALE_TYPES, ExpectedTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

    from runner_svc.weights.matrix import Matrix


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

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors) -> Matrix:
        """Returns the matrix of a module."""
        from runner_svc.weights.int4_matrix import Int4Matrix
        from runner_svc.weights.int4_packing import AWQ_ORDER, pack_pairs, unpack_words

        codes = unpack_words(stored.read(f"{module}.qweight"), 1, AWQ_ORDER).t()
        zeros = unpack_words(stored.read(f"{module}.qzeros"), 1, AWQ_ORDER).t().contiguous()
        self._check_zeros(zeros, module)
        scales = _checked(stored.read(f"{module}.scales"), f"{module}.scales").t().contiguous()
        return Int4Matrix(pack_pairs(codes), scales, _unless_middle(zeros), self._group(columns), columns)


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

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors) -> Matrix:
        """Returns the matrix of a module. Raises UnsupportedModel for zeros or a `g_idx` whose meaning is unclear."""
        from runner_svc.weights.int4_matrix import Int4Matrix
        from runner_svc.weights.int4_packing import pack_pairs, unpack_words

        codes = unpack_words(stored.read(f"{module}.qweight"), 0).t()
        zeros = unpack_words(stored.read(f"{module}.qzeros"), 1).t().contiguous()
        if self.version == 1:
            if bool((zeros == 15).any()):
                raise UnsupportedModel(
                    f"The checkpoint's {module}.qzeros has a 15, which readers of GPTQ take for a zero of 0 or of 16: "
                    "store the model with checkpoint_format gptq_v2."
                )
            zeros = zeros + 1
        self._check_zeros(zeros, module)
        scales = _checked(stored.read(f"{module}.scales"), f"{module}.scales").t().contiguous()
        order = self._order(module, columns, stored)
        if order is not None:
            codes = codes[:, order]
        return Int4Matrix(pack_pairs(codes), scales, _unless_middle(zeros), self._group(columns), columns, order)

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

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors) -> Matrix:
        """Returns the matrix of a module. Raises UnsupportedModel if its `weight_shape` is another one."""
        from runner_svc.weights.int4_matrix import Int4Matrix
        from runner_svc.weights.int4_packing import pack_pairs, unpack_words

        shape = stored.read(f"{module}.weight_shape").tolist()
        if shape != [rows, columns]:
            raise UnsupportedModel(
                f"The checkpoint's {module}.weight_shape is {shape}, but by its config.json it should be "
                f"{[rows, columns]}."
            )
        codes = unpack_words(stored.read(f"{module}.weight_packed"), 1)[:, :columns]
        scales = _checked(stored.read(f"{module}.weight_scale"), f"{module}.weight_scale")
        zeros = None
        if not self.symmetric:
            zeros = unpack_words(stored.read(f"{module}.weight_zero_point"), 0)[:rows].contiguous()
        return Int4Matrix(
            pack_pairs(codes), scales.reshape(rows, -1).contiguous(), zeros, self._group(columns), columns
        )


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
