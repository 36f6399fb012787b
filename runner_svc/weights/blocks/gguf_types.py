"""The blocks of GGUF's tensors as they lie in a file, and the integers in them.

Bit for bit as the package `gguf` has it. Types whose numbers come from tables (IQ and TQ types) are not here: they are
dequantized when a file is converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.weights.blocks.grouped import Grouped


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of ggml."""

    name: str
    elements: int
    """Of a block: adjacent columns."""
    num_bytes: int
    unpack: Callable[[Tensor], Grouped]
    """Returns the integers of blocks, uint8 [blocks, num_bytes], with a row for each block."""


def _half(content: Tensor) -> Tensor:
    """Returns float32 [blocks, numbers] of float16 numbers, uint8 [blocks, 2 * numbers]."""
    return content.contiguous().view(torch.float16).float()


def _spread(content: Tensor, bits: int, run: int) -> Tensor:
    """Returns codes of some bits, flat in each block.

    A `run` of bytes holds the low bits of as many codes, then the next bits of the codes that follow them.
    """
    words = content.clone(memory_format=torch.contiguous_format).view(torch.int32)  # four at once: a third of the time
    mask = (2**bits - 1) * 0x01010101
    parts = [((words >> shift) & mask).view(torch.uint8) for shift in range(0, 8, bits)]
    return torch.stack([part.unflatten(1, (-1, run)) for part in parts], dim=2).flatten(1)


def _fifth_bits(content: Tensor) -> Tensor:
    """Returns 16 or 0 for each bit, uint8 [blocks, 32] of four bytes."""
    table = (torch.arange(256, device=content.device).unsqueeze(-1) >> torch.arange(8, device=content.device)) & 1
    return (table << 4).to(torch.uint8)[content.int()].flatten(1)


def _q4_1(blocks: Tensor) -> Grouped:
    return Grouped(_spread(blocks[:, 4:], 4, 16), 4, 0, _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q5_0(blocks: Tensor) -> Grouped:
    codes = _spread(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6])
    return Grouped(codes, 5, 16, _half(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> Grouped:
    codes = _spread(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8])
    return Grouped(codes, 5, 0, _half(blocks[:, :2]), _half(blocks[:, 2:4]))


def _q2_k(blocks: Tensor) -> Grouped:
    scales = blocks[:, :16]
    return Grouped(
        _spread(blocks[:, 16:80], 2, 32),
        2,
        0,
        _half(blocks[:, 80:82]) * (scales & 15).float(),
        -(_half(blocks[:, 82:84]) * (scales >> 4).float()),
    )


def _q3_k(blocks: Tensor) -> Grouped:
    codes = _spread(blocks[:, 32:96], 2, 32) | (_spread(blocks[:, :32], 1, 32) << 2)
    scales = _spread(blocks[:, 96:104], 4, 8) | (_spread(blocks[:, 104:108], 2, 4) << 4)
    return Grouped(codes, 3, 4, _half(blocks[:, 108:110]) * (scales.float() - 32))


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns those of the 8 groups of Q4_K and Q5_K: 6 bits for each, in units of two float16 numbers."""
    scales, minima, upper = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    own = torch.cat((scales & 63, (upper & 15) | ((scales >> 2) & 48)), dim=1)
    least = torch.cat((minima & 63, (upper >> 4) | ((minima >> 2) & 48)), dim=1)
    return _half(blocks[:, :2]) * own.float(), -(_half(blocks[:, 2:4]) * least.float())


def _q4_k(blocks: Tensor) -> Grouped:
    return Grouped(_spread(blocks[:, 16:], 4, 32), 4, 0, *_scales_and_offsets(blocks))


def _q5_k(blocks: Tensor) -> Grouped:
    codes = _spread(blocks[:, 48:], 4, 32) | (_spread(blocks[:, 16:48], 1, 32) << 4)
    return Grouped(codes, 5, 0, *_scales_and_offsets(blocks))


def _q6_k(blocks: Tensor) -> Grouped:
    codes = _spread(blocks[:, :128], 4, 64) | (_spread(blocks[:, 128:192], 2, 32) << 4)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return Grouped(codes, 6, 32, _half(blocks[:, 208:210]) * scales)


BLOCK_TYPES = {
    each.name: each
    for each in (
        BlockType("Q4_1", 32, 20, _q4_1),
        BlockType("Q5_0", 32, 22, _q5_0),
        BlockType("Q5_1", 32, 24, _q5_1),
        BlockType("Q2_K", 256, 84, _q2_k),
        BlockType("Q3_K", 256, 110, _q3_k),
        BlockType("Q4_K", 256, 144, _q4_k),
        BlockType("Q5_K", 256, 176, _q5_k),
        BlockType("Q6_K", 256, 210, _q6_k),
    )
}
"""By name. Q4_0 and Q8_0 become `Int4Matrix` and `Int8Matrix`."""
