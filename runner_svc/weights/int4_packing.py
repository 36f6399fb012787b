"""The layouts of 4-bit numbers: eight to an int32 in checkpoints, two to a byte here.

| layout | AWQ (gemm) | GPTQ | pack-quantized |
| --- | --- | --- | --- |
| weights | [in, out / 8] | [in / 8, out] | [out, in / 8] |
| zeros | [groups, out / 8] | [groups, out / 8] | [out / 8, groups] |
| scales | [groups, out] | [groups, out] | [out, groups] |
| nibble n of a word, from the low end | `AWQ_ORDER`[n] | n | n |
"""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def unpack_words(words: Tensor, dim: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Returns uint8 codes of int32 words, each of which holds eight along `dim`; nibble n is number order[n]."""
    shifts = torch.empty(8, dtype=torch.int32, device=words.device)
    for nibble, place in enumerate(order):
        shifts[place] = 4 * nibble
    moved = words.movedim(dim, -1)
    codes = (moved.unsqueeze(-1) >> shifts) & 15
    return codes.to(torch.uint8).flatten(-2).movedim(-1, dim)


def pack_words(codes: Tensor, dim: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Returns the int32 words of codes; the inverse of `unpack_words`."""
    grouped = codes.movedim(dim, -1).to(torch.int64).unflatten(-1, (-1, 8))
    words = torch.zeros_like(grouped[..., 0])
    for nibble, place in enumerate(order):
        words |= grouped[..., place] << (4 * nibble)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


def pack_pairs(codes: Tensor) -> Tensor:
    """Returns uint8 [rows, ceil(columns / 2)] of uint8 codes [rows, columns], the even columns in the low bits."""
    padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, ::2] | (padded[:, 1::2] << 4)


def unpack_pairs(pairs: Tensor, columns: int) -> Tensor:
    """Returns the uint8 codes [rows, columns]; the inverse of `pack_pairs`."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :columns]
