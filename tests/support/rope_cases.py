"""QKV products with positions, and the float32 reference for QK-norm, rotation and the KV write.

`check_write` and `check_fp8_write` take the launcher: the kernel's on a GPU, or the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.decoder.rope import Rotation
from runner_svc.interface.kv_cache import FP8
from runner_svc.interface.products.linear_launchers import Scaling
from runner_svc.model.families.description import QkNorm

# heads, KV heads, head_dim, rotary_dim, dtype
SHAPES = [
    (9, 3, 64, 64, torch.bfloat16),
    (32, 8, 128, 128, torch.bfloat16),
    (16, 8, 128, 64, torch.float16),
    (4, 4, 96, 96, torch.bfloat16),
    (8, 1, 256, 256, torch.float16),
    (5, 5, 80, 20, torch.bfloat16),
    (6, 2, 64, 0, torch.float16),
]
EPS = 1e-6
BLOCK_SIZE = 16
NUM_BLOCKS = 40
_POSITIONS = 2000
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class RopeCase:
    """Sizes of a model's attention and of a step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype
    num_tokens: int
    qk_norm: QkNorm
    plus_one: bool = False

    def norm_sizes(self) -> Sequence[int]:
        """Returns the numbers of weights of the queries' norm and of the keys'."""
        if self.qk_norm is QkNorm.NONE:
            return ()
        heads = (1, 1) if self.qk_norm is QkNorm.HEAD else (self.num_heads, self.num_kv_heads)
        return [count * self.head_dim for count in heads]

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns queries or keys, float32 [T, heads, head_dim], normed."""
        weight = weight.float() + self.plus_one
        if self.qk_norm is QkNorm.HEAD:
            return functional.rms_norm(x, (self.head_dim,), weight, EPS)
        if self.qk_norm is QkNorm.PROJECTION:
            return functional.rms_norm(x.flatten(1), weight.shape, weight, EPS).view_as(x)
        return functional.layer_norm(x, (self.head_dim,), eps=EPS) * weight.view(x.shape[1:])


Launcher = Callable[..., None]
Make = Callable[[RopeCase], Launcher]


class RopeBatch:
    """A case with its tensors."""

    def __init__(self, case: RopeCase, device: torch.device, spread: float = 1.0) -> None:
        self.case = case
        count, heads, head_dim = case.num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim
        self.qkv = torch.randn(count, heads, head_dim, device=device, dtype=case.dtype) * spread
        self.positions = torch.randint(0, _POSITIONS, (count,), device=device, dtype=torch.int32)
        self.slot_mapping = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=device)[:count].int()
        self.norms = [torch.rand(size, device=device, dtype=case.dtype) + 0.5 for size in case.norm_sizes()]
        inv_freq = 10000.0 ** -(torch.arange(0, case.rotary_dim, 2, device=device) / max(case.rotary_dim, 1))
        self._angles = torch.arange(_POSITIONS, device=device).float().unsqueeze(1) * inv_freq
        self.rotations = torch.cat((self._angles.cos(), self._angles.sin()), dim=-1).contiguous()
        self.cache_shape = (2, NUM_BLOCKS, BLOCK_SIZE, case.num_kv_heads, head_dim)

    def expected(self) -> Tensor:
        """Returns float32 [T, heads + 2 * kv_heads, head_dim] with queries and keys normed and rotated."""
        case, expected = self.case, self.qkv.float()
        num_rotated = case.num_heads + case.num_kv_heads
        parts = (slice(0, case.num_heads), slice(case.num_heads, num_rotated))
        for part, weight in zip(parts, self.norms, strict=False):
            expected[:, part] = case.normed(expected[:, part], weight).to(case.dtype).float()
        if case.rotary_dim:
            chosen = self._angles[self.positions.long()]
            cos, sin = chosen.cos(), chosen.sin()
            rotation = Rotation(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))
            expected[:, :num_rotated] = rotation.apply(expected[:, :num_rotated])
        return expected

    def lengths(self, rotated: Tensor) -> Tensor:
        """Returns the length of each element's rotation pair [..., head_dim]; unrotated elements: the magnitude.

        Rotation preserves the length of a pair.
        """
        lengths, half = rotated.abs(), self.case.rotary_dim // 2
        first, second = rotated[..., :half], rotated[..., half : 2 * half]
        lengths[..., :half] = lengths[..., half : 2 * half] = torch.hypot(first, second)
        return lengths


def check_write(make: Make, case: RopeCase, device: torch.device, stream: int, in_place: bool) -> None:
    """Checks a write into a cache of the same dtype, filled with NaN before."""
    batch, kv_heads, head_dim = RopeBatch(case, device), case.num_kv_heads, case.head_dim
    expected = batch.expected()
    cache = torch.full(batch.cache_shape, torch.nan, device=device, dtype=case.dtype)
    flat = batch.qkv.view(case.num_tokens, -1).clone()
    width = case.num_heads * head_dim
    queries = flat[:, :width] if in_place else torch.full_like(flat[:, :width], torch.nan)
    norms = batch.norms or [None, None]
    make(case)(stream, flat, queries, cache, batch.rotations, batch.positions, batch.slot_mapping, *norms)

    tolerance = {"rtol": 2 * torch.finfo(case.dtype).eps, "atol": 2 * torch.finfo(case.dtype).eps}
    rotated = case.num_heads + kv_heads
    shown = queries.float().view(case.num_tokens, case.num_heads, head_dim)
    torch.testing.assert_close(shown, expected[:, : case.num_heads], **tolerance)
    written = cache.view(2, -1, kv_heads, head_dim)[:, batch.slot_mapping.long()].float()
    torch.testing.assert_close(written[0], expected[:, case.num_heads : rotated], **tolerance)
    torch.testing.assert_close(written[1], expected[:, rotated:], rtol=0, atol=0)
    assert int(cache.isfinite().sum()) == 2 * case.num_tokens * kv_heads * head_dim  # and nothing else was written


def check_sums(make: Make, case: RopeCase, device: torch.device, stream: int) -> None:
    """Checks that sums, scaled on the way, give the bits of their product."""
    batch = RopeBatch(case, device)
    sums = batch.qkv.view(case.num_tokens, -1) * 100
    scaling = Scaling(torch.rand(case.num_tokens, 1, device=device), torch.rand(sums.shape[1], 1, device=device))
    product = (sums.float() * scaling.factors * scaling.scales.t()).to(case.dtype)
    results = []
    for flat, told in ((product, None), (sums, scaling)):
        cache = torch.full(batch.cache_shape, torch.nan, device=device, dtype=case.dtype)
        queries = torch.full_like(flat[:, : case.num_heads * case.head_dim], torch.nan)
        inputs = batch.rotations, batch.positions, batch.slot_mapping
        make(case)(stream, flat, queries, cache, *inputs, *(batch.norms or [None, None]), None, told)
        results.append((queries, cache.view(torch.int16)))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def check_fp8_write(make: Make, case: RopeCase, device: torch.device, stream: int) -> None:
    """Checks a write into an FP8 cache, filled with NaN before, with a key scale and a value scale for each head."""
    batch, kv_heads = RopeBatch(case, device, spread=20.0), case.num_kv_heads
    scales = torch.rand(2, kv_heads, device=device) + 0.25
    scales[0, -1] = 0.001  # so small that it saturates
    cache = torch.zeros(batch.cache_shape, device=device, dtype=FP8)
    cache.view(torch.uint8).fill_(0x7F)  # NaN
    flat = batch.qkv.view(case.num_tokens, -1).clone()
    queries = torch.full_like(flat[:, : case.num_heads * case.head_dim], torch.nan)
    norms = batch.norms or [None, None]
    make(case)(stream, flat, queries, cache, batch.rotations, batch.positions, batch.slot_mapping, *norms, scales)

    expected = batch.expected()
    eps, of_head = torch.finfo(case.dtype).eps, scales.view(2, 1, kv_heads, 1)
    shown = queries.float().view(case.num_tokens, case.num_heads, case.head_dim)
    slack = 2 * eps * batch.lengths(expected)
    assert bool(((shown - expected[:, : case.num_heads]).abs() <= slack[:, : case.num_heads]).all())
    wanted, slack = (
        part[:, case.num_heads :].view(case.num_tokens, 2, kv_heads, -1).transpose(0, 1) for part in (expected, slack)
    )
    slack[1] = 0  # values are not rounded before the conversion
    limit = _FP8_MAX * of_head
    stored = cache.float().view(2, -1, kv_heads, case.head_dim)
    written = stored[:, batch.slot_mapping.long()] * of_head
    assert bool((wanted[0].abs() > limit[0]).any()), "nothing saturates"
    wanted = wanted.clamp(-limit, limit)
    # e4m3 has three mantissa bits after the leading one; steps below the smallest normal number are 2 ** -9.
    rounding = wanted.abs() * 2**-4 + of_head * 2**-10
    assert bool(((written - wanted).abs() <= rounding * (1 + 1e-5) + slack).all())
    assert (
        int(stored.isfinite().sum()) == 2 * case.num_tokens * kv_heads * case.head_dim
    )  # and nothing else was written
