"""Checks of a copy of KV blocks between a cache and a staging buffer, against indexing, with poison around."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runner_svc.tiers.block_copies import BlockCopies, Region

_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class MoveCase:
    """Shape of a cache, and how many of its blocks are moved."""

    num_parts: int
    num_blocks: int
    piece_bytes: int
    count: int
    behind: int = 0
    """Bytes of other regions behind a staged block."""


MOVES = [
    MoveCase(1, 2, 16, 1),
    MoveCase(3, 5, 48, 4, behind=16),  # less than a warp's vectors
    MoveCase(2, 9, 512, 8),  # one vector a lane
    MoveCase(7, 11, 2064, 5, behind=32),  # some lanes have one more
    MoveCase(60, 40, 6144, 17),  # SmolLM2 in 16 bits
    MoveCase(64, 20, 32768, 8),  # an 8B's blocks, a chunk of them
    MoveCase(5, 400, 1008, 333, behind=48),
]


def bytes_of(*shape: int, device: torch.device) -> Tensor:
    """Returns random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def check_moves(
    copies: BlockCopies, case: MoveCase, device: torch.device, pinned: Tensor, stream: int, done: Callable[[], None]
) -> None:
    """Checks both ways; `pinned`: int32 [at least count], which the device reads; `done` waits for it."""
    parts, num_blocks, piece, count = case.num_parts, case.num_blocks, case.piece_bytes, case.count
    ids = torch.randperm(num_blocks)[:count]
    pinned[:count] = ids.int()
    stride = parts * piece + case.behind
    cache = bytes_of(parts, num_blocks, piece, device=device)
    staged = torch.full((count + 1, stride), _POISON, dtype=torch.uint8, device=device)
    kept = cache.cpu().clone()
    copies.gather(stream, Region.of(cache, num_blocks), staged.data_ptr(), stride, pinned.data_ptr(), count)
    done()
    found = staged.cpu()
    assert torch.equal(found[:count, : parts * piece], kept[:, ids].transpose(0, 1).reshape(count, -1))
    assert (found[:count, parts * piece :] == _POISON).all() and (found[count] == _POISON).all()
    assert torch.equal(cache.cpu(), kept), "the cache was changed"
    incoming = bytes_of(count, stride, device=device)
    copies.scatter(stream, Region.of(cache, num_blocks), incoming.data_ptr(), stride, pinned.data_ptr(), count)
    done()
    kept[:, ids] = incoming.cpu()[:, : parts * piece].reshape(count, parts, piece).transpose(0, 1)
    assert torch.equal(cache.cpu(), kept)
