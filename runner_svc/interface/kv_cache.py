"""The paged KV cache: one tensor, divided into the blocks of the block tables.

Memory is not initialised: pages are committed as blocks are first written, and attention must never read a position
that was not written (tests enforce this by filling the cache with NaN). Block 0 is the dummy block that padding points
to; plans can't use it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FP8 = torch.float8_e4m3fn


class CachedHeads(Protocol):
    """The sizes of a model that a cache depends on; implemented by `runner_svc.model.config.ModelConfig`."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class KVCache:
    """Keys and values of all layers: `data` is [layers, 2, num_blocks + 1, block_size, kv_heads, head_dim].

    An element of an FP8 cache is stored in units of `scales`, float32 [layers, 2, kv_heads]; other caches have none.
    """

    def __init__(
        self,
        config: CachedHeads,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> None:
        """`scales` requires the dtype FP8, whose default scale is 1.0.

        `memory`: uint8 [at least `num_bytes`] that the cache is to lie in; None allocates it.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scales = scales
        if dtype is FP8 and scales is None:
            self.scales = torch.ones(config.num_layers, 2, config.num_kv_heads, device=device)
        shape = (config.num_layers, 2, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        if memory is None:
            self.data = torch.empty(shape, dtype=dtype, device=device)
        else:
            self.data = memory[: self.num_bytes(config, num_blocks, block_size, dtype)].view(dtype).view(shape)
        # Views are created once, because each step needs those of all layers.
        # Per layer, [2 * (num_blocks + 1), elements of a block]: the blocks of the keys, then those of the values.
        self.blocks: list[Tensor] = [layer.view(2 * (num_blocks + 1), -1) for layer in self.data]
        # Per layer, [2, (num_blocks + 1) * block_size, kv_heads * head_dim]: positions of the keys and the values.
        self._positions = [layer.view(2, -1, config.num_kv_heads * config.head_dim).unbind() for layer in self.data]

    @staticmethod
    def block_bytes(config: CachedHeads, block_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of one block over all layers."""
        return config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize

    @classmethod
    def num_bytes(cls, config: CachedHeads, num_blocks: int, block_size: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a cache, the dummy block included."""
        return (num_blocks + 1) * cls.block_bytes(config, block_size, dtype)

    def layer_scales(self, layer: int) -> Tensor | None:
        """Returns the layer's scales, float32 [2, kv_heads]; None unless the cache is FP8."""
        return None if self.scales is None else self.scales[layer]

    def scale_addresses(self) -> list[int]:
        """Returns the device address of each layer's scales; 0 if it has none."""
        if self.scales is None:
            return [0] * len(self.data)
        return [layer.data_ptr() for layer in self.scales]

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Stores keys and values [T, kv_heads * head_dim] at int64 `slot_mapping` [T] (block * block_size + offset)."""
        key_positions, value_positions = self._positions[layer]
        key_positions.index_copy_(0, slot_mapping, keys)
        value_positions.index_copy_(0, slot_mapping, values)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole blocks, int64 ids [N] each; all sources are read before any target is written."""
        words = self.data.view(torch.uint8)  # not every operation supports FP8
        words.index_copy_(2, targets, words.index_select(2, sources))


def int64(array: NDArray[np.integer]) -> Tensor:
    """Returns the array as an int64 tensor on the CPU, as indexes of blocks and positions have to be."""
    return torch.from_numpy(array.astype(np.int64))
