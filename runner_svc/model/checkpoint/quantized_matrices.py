"""Which matrices of a checkpoint are quantized, in which format, and which tensors they have; needs no torch.

Tied heads and routers, and matrices that are stored [in, out], must be plain so far.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runner_svc.model.checkpoint.expected_experts import block_name
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.experts_config import ExpertsConfig
from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.folder.safetensors_header import ELEMENT_BYTES
from runner_svc.model.quantization.stored_format import ExpectedTensor, StoredFormat, StoredTensors
from runner_svc.model.quantization.stored_mxfp4 import StoredMxfp4
from runner_svc.weights.matrix_part import WHOLE_MATRIX, MatrixPart

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from runner_svc.weights.matrix import Matrix

Shape = tuple[int, ...]
_SUFFIX = ".weight"


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [rows, columns] of a module."""

    module: str
    format: StoredFormat
    rows: int
    columns: int

    def tensors(self) -> dict[str, ExpectedTensor]:
        """Returns its tensors by name. Raises UnsupportedModel for sizes that its format can't have."""
        return {each.name: each for each in self.format.tensors(self.module, self.rows, self.columns)}

    def read(self, stored: StoredTensors, part: MatrixPart, dtype: torch.dtype) -> Matrix:
        """Returns a part, without reading more than it needs. `dtype`: of a part that becomes plain; see `part_of`."""
        if part == WHOLE_MATRIX:
            return self.format.read(self.module, self.rows, self.columns, stored)
        from runner_svc.weights.cutting import part_of
        from runner_svc.weights.matrix import joined

        units, size, found = self.format.units(self.rows, self.columns), (self.rows, self.columns), []
        for region in part.regions:
            outer = region.outward(units, size)
            matrix, inner = self.format.read(self.module, *size, stored, outer), region.within(outer)
            rows = (inner.rows,) if inner.rows is not None else None
            found.append(part_of(matrix, MatrixPart(rows, inner.columns), dtype))
        return joined(found)


@dataclass(frozen=True, slots=True)
class QuantizedStack:
    """The matrices [rows, columns] of all experts of a layer, in one tensor."""

    module: str
    format: StoredMxfp4
    count: int
    rows: int
    columns: int

    def tensors(self) -> dict[str, ExpectedTensor]:
        """Returns its tensors by name. Raises UnsupportedModel for sizes that its format can't have."""
        return {each.name: each for each in self.format.stacked(self.module, self.count, self.rows, self.columns)}

    def read(self, stored: StoredTensors, part: MatrixPart, dtype: torch.dtype) -> Matrix:
        """Returns the part of each, beneath each other; it has rows in one piece. `dtype`: see `QuantizedMatrix`."""
        (region,) = part.regions
        if region.columns is None:
            return self.format.read_stack(self.module, stored, region)
        from runner_svc.weights.cutting import part_of

        outer = region.outward(self.format.units(self.rows, self.columns), (self.rows, self.columns))
        matrix = self.format.read_stack(self.module, stored, outer)
        return part_of(matrix, MatrixPart(None, region.within(outer).columns), dtype)


Quantized = QuantizedMatrix | QuantizedStack


def quantized_matrices(
    expected: Mapping[str, Shape], config: ModelConfig, base: str, tensors: Container[str]
) -> dict[str, Quantized]:
    """Returns the quantized ones among the `expected` tensors, by module.

    Raises UnsupportedModel for a module that can't be quantized yet.
    """
    if config.quantization is None:
        return {}
    plain = _plain_modules(config, base, tensors)
    norms = f".{config.names.q_norm}", f".{config.names.k_norm}"  # Cohere's have a row for each head
    found: dict[str, Quantized] = {}
    for name, shape in expected.items():
        if len(shape) == 3 and (stack := _stack(name, shape, config)) is not None:
            found[name] = stack
        module = name.removesuffix(_SUFFIX)
        if module == name or len(shape) != 2 or module in _tables(config, base) or module.endswith(norms):
            continue
        stored = config.quantization.format_of(module)
        if stored is None:
            continue
        may_be_plain = module in plain or module in config.quantization.perhaps_left
        if may_be_plain and _is_plain(QuantizedMatrix(module, stored, *shape), tensors):
            continue
        if module in plain or config.names.transposed:
            raise UnsupportedModel(
                f"By the model's 'quantization_config', {module!r} is quantized ({stored.name}), which is not "
                f"supported for {plain.get(module, config.architecture)}: use a checkpoint that leaves it out."
            )
        found[module] = QuantizedMatrix(module, stored, *shape)
    return found


def _is_plain(matrix: QuantizedMatrix, tensors: Container[str]) -> bool:
    """Returns whether a checkpoint has the plain matrix: GPTQ, for one, can't say that it leaves routers out."""
    name = f"{matrix.module}{_SUFFIX}"
    try:
        others = matrix.tensors().keys() - {name}
    except UnsupportedModel:  # it has no size of the format
        return name in tensors
    return name in tensors and not any(other in tensors for other in others)


def _stack(name: str, shape: Shape, config: ModelConfig) -> QuantizedStack | None:
    """Returns the stack of a tensor of all experts; formats of single matrices do not apply to it."""
    stored = config.quantization.format_of(name) if config.quantization is not None else None
    if not isinstance(stored, StoredMxfp4):
        return None
    count, rows, columns = (shape[0], *(shape[:0:-1] if config.names.experts.interleaved else shape[1:]))
    return QuantizedStack(name, stored, count, rows, columns)


def with_formats(
    expected: Mapping[str, Shape], matrices: Mapping[str, Quantized], tensors: Container[str]
) -> dict[str, ExpectedTensor]:
    """Returns all tensors by name; those of quantized matrices in place of the plain ones."""
    found: dict[str, ExpectedTensor] = {}
    for name, shape in expected.items():
        matrix = matrices.get(name.removesuffix(_SUFFIX))
        if matrix is None:
            found[name] = ExpectedTensor(name, (shape,), tuple(ELEMENT_BYTES))
        else:
            found |= matrix.tensors()
    return {name: each for name, each in found.items() if each.required or name in tensors}


def check_stray_biases(
    matrices: Mapping[str, Quantized],
    expected: Container[str],
    tensors: Container[str],
    read: Callable[[str], Tensor],
) -> None:
    """Raises UnsupportedModel for a bias of a quantized matrix that the model lacks, unless it is zero.

    `expected`: the tensors of the model.
    """
    for module in matrices:
        name = f"{module}.bias"
        if name in tensors and name not in expected and bool(read(name).any()):
            raise UnsupportedModel(
                f"The checkpoint has a bias {name!r} that is not zero, which the model with its config.json lacks: "
                "correct config.json, or delete the tensor."
            )


class MatrixReader(Protocol):
    """Reads quantized matrices."""

    def __call__(self, module: str, part: MatrixPart = WHOLE_MATRIX, /) -> Matrix | None:
        """Returns a part of a module's matrix; None if that is plain."""


class QuantizedReader:
    """Implements `MatrixReader` for the quantized matrices of a checkpoint."""

    def __init__(
        self,
        matrices: Mapping[str, Quantized],
        tensors: Container[str],
        read: Callable[..., Tensor],
        dtype: torch.dtype,
    ) -> None:
        """`read`: tensors as stored; `dtype`: of parts that become plain."""
        self.made_plain: list[str] = []
        """Modules whose format has no such part, so that it was made plain."""
        self._matrices, self._stored, self._dtype = matrices, StoredTensors(tensors, read), dtype

    def __call__(self, module: str, part: MatrixPart = WHOLE_MATRIX, /) -> Matrix | None:
        """See `MatrixReader`."""
        if module not in self._matrices:
            return None
        matrix = self._matrices[module].read(self._stored, part, self._dtype)
        if matrix.format == str(self._dtype).removeprefix("torch."):
            self.made_plain.append(module)
        return matrix


def _tables(config: ModelConfig, base: str) -> tuple[str, str]:
    """Returns the modules whose matrices are looked up in and not multiplied with."""
    return f"{base}{config.names.embeddings}", f"{base}{config.names.positions}"


def _plain_modules(config: ModelConfig, base: str, tensors: Container[str]) -> dict[str, str]:
    """Returns the modules that must be plain, each with what it is."""
    found = {config.names.head: "a head that is tied to the embeddings"} if config.tied_embeddings else {}
    names = config.names.experts
    for index, layer in enumerate(config.layers):
        if isinstance(layer.mlp, ExpertsConfig):
            block = block_name(f"{base}{config.names.layers}.{index}", names, tensors)
            found |= {f"{block}.{names.router}": "routers", f"{block}.{names.shared}_gate": "gates of experts"}
    return found
