"""The scales of keys and values that a checkpoint was calibrated with: which tensors hold them, and their numbers."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from runner_svc.model.config import ModelConfig
from runner_svc.model.folder.errors import UnsupportedModel
from runner_svc.model.quantization.stored_format import SCALE_TYPES, ExpectedTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


def kv_scale_tensors(config: ModelConfig, base: str, tensors: Container[str]) -> dict[str, ExpectedTensor]:
    """Returns the tensors by name, two for each layer; none for a checkpoint without such scales."""
    names = [name for pair in _names(config, base, tensors) for name in pair]
    return {name: ExpectedTensor(name, _SHAPES, SCALE_TYPES) for name in names}


def read_kv_scales(config: ModelConfig, base: str, stored: StoredTensors) -> Tensor | None:
    """Returns float32 [layers, 2] of keys and of values: a number is cached as its quotient by the scale.

    None for a checkpoint without them. Raises UnsupportedModel for a scale that is not a positive number.
    """
    import torch

    rows = []
    for pair in _names(config, base, stored.names):
        scales = [float(stored.read(name).float()) for name in pair]
        for name, scale in zip(pair, scales, strict=True):
            if not 0 < scale < float("inf"):
                raise UnsupportedModel(f"The checkpoint's {name} is {scale}, not a positive number.")
        rows.append(scales)
    return torch.tensor(rows, dtype=torch.float32) if rows else None


def _names(config: ModelConfig, base: str, tensors: Container[str]) -> Iterator[tuple[str, str]]:
    """Yields those of each layer: below its attention (compressed-tensors), or below its products (modelopt)."""
    if config.quantization is None or not config.quantization.has_kv_scales:
        return
    keys, values = (config.names.qkv[1], config.names.qkv[2]) if len(config.names.qkv) == 3 else config.names.qkv * 2
    attention = keys.rpartition(".")[0]
    for index in range(config.num_layers):
        prefix = f"{base}{config.names.layers}.{index}"
        above = f"{prefix}.{attention}.k_scale", f"{prefix}.{attention}.v_scale"
        below = f"{prefix}.{keys}.k_scale", f"{prefix}.{values}.v_scale"
        yield below if below[0] in tensors else above
