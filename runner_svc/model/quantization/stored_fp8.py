"""FP8 (e4m3) matrices in checkpoints: the codes in NAME.weight, with scales beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.stored_format import SCALE_TYPES, ExpectedTensor, StoredTensors
from runner_svc.weights.matrix_part import ALL, Region, counted

if TYPE_CHECKING:
    from torch import Tensor

    from runner_svc.weights.activation_rounding import Rounding
    from runner_svc.weights.matrix import Matrix


class Scales(StrEnum):
    """What has a scale of its own among the weights."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


class Activations(StrEnum):
    """How the other side of the product is rounded."""

    PLAIN = "not rounded"
    STATIC = "static"
    TOKEN = "per token"
    GROUP = "per token and columns of a block"


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """Weights are codes * scales; `scale` is the tensor's name below the module."""

    scales: Scales
    activations: Activations
    scale: str = "weight_scale"
    block: tuple[int, int] | None = None
    bound: float | None = None
    """See `TokenRounding`."""

    @property
    def name(self) -> str:
        """For logs and refusals."""
        return f"FP8 per {self.scales}, activations {self.activations}"

    @property
    def unit(self) -> int:
        """See `StoredFormat`."""
        return math.lcm(*self.block) if self.block is not None else 1

    def tensors(self, module: str, rows: int, columns: int) -> Iterator[ExpectedTensor]:
        """Yields the tensors of the matrix [rows, columns] of a module."""
        yield ExpectedTensor(f"{module}.weight", ((rows, columns),), ("F8_E4M3",))
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
        if self.scales is Scales.CHANNEL:
            shapes = ((rows, 1), (rows,))
        elif self.block is not None:
            shapes = ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        yield ExpectedTensor(f"{module}.{self.scale}", shapes, SCALE_TYPES)
        if self.activations is Activations.STATIC:
            yield ExpectedTensor(f"{module}.input_scale", ((), (1,), (1, 1)), SCALE_TYPES)

    def units(self, rows: int, columns: int) -> tuple[int, int]:
        """See `StoredFormat`."""
        return self.block if self.scales is Scales.BLOCK and self.block is not None else (1, 1)

    def read(self, module: str, rows: int, columns: int, stored: StoredTensors, region: Region = ALL) -> Matrix:
        """Returns a region of the matrix. Raises UnsupportedModel for a scale or a code that is no number."""
        from runner_svc.weights.fp8_matrix import Fp8Matrix, has_nan, per_channel

        scale = self._scale(module, stored, region).float()
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise UnsupportedModel(f"The checkpoint's {module}.{self.scale} has a scale that is not a positive number.")
        is_block = self.scales is Scales.BLOCK
        codes = stored.part(f"{module}.weight", region.rows, region.columns)
        if has_nan(codes):
            raise UnsupportedModel(
                f"The checkpoint's {module}.weight has codes that stand for no number: it is broken, or in e4m3fnuz, "
                "which is not supported."
            )
        return Fp8Matrix(
            codes,
            scale if is_block else per_channel(scale, len(codes)),
            self._rounding(module, stored),
            self.block if is_block else None,
        )

    def _scale(self, module: str, stored: StoredTensors, region: Region) -> Tensor:
        name = f"{module}.{self.scale}"
        if self.scales is Scales.TENSOR:
            return stored.read(name)
        if self.block is None:
            return stored.part(name, region.rows)
        return stored.part(name, counted(region.rows, self.block[0]), counted(region.columns, self.block[1]))

    def _rounding(self, module: str, stored: StoredTensors) -> Rounding:
        from runner_svc.weights.activation_rounding import GroupRounding, NoRounding, StaticRounding, TokenRounding

        if self.activations is Activations.PLAIN:
            return NoRounding()
        if self.activations is Activations.TOKEN:
            return TokenRounding(self.bound)
        if self.activations is Activations.GROUP:
            assert self.block is not None, "only blocks have groups of activations"
            return GroupRounding(self.block[1])
        value = float(stored.read(f"{module}.input_scale").float())
        if not 0 < value < float("inf"):
            raise UnsupportedModel(f"The checkpoint's {module}.input_scale is {value}, not a positive number.")
        return StaticRounding(value)
