"""QK-norm, rotation and KV write on the GPU against the CPU decoder's parts in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.model.rope import Rotation

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.rope_kv import RopeKvWrite, rotation_table  # imports CuPy

EPS = 1e-6
BLOCK_SIZE = 16
NUM_BLOCKS = 40


def angles(rotary_dim: int) -> Tensor:
    inv_freq = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device="cuda") / max(rotary_dim, 1))
    return torch.arange(2000, device="cuda").float().unsqueeze(1) * inv_freq


def expected_qkv(
    qkv: Tensor, positions: Tensor, num_rotated: int, rotary_dim: int, norms: list[Tensor] | None, heads: int
) -> Tensor:
    """float32 [T, heads + 2 * kv_heads, head_dim] with queries and keys normed and rotated."""
    expected = qkv.float()
    head_dim = qkv.shape[-1]
    if norms:
        for part, weight in ((slice(0, heads), norms[0]), (slice(heads, num_rotated), norms[1])):
            normed = functional.rms_norm(expected[:, part], (head_dim,), weight.float(), EPS)
            expected[:, part] = normed.to(qkv.dtype).float()
    if rotary_dim:
        chosen = angles(rotary_dim)[positions.long()]
        cos, sin = chosen.cos(), chosen.sin()
        rotation = Rotation(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))
        expected[:, :num_rotated] = rotation.apply(expected[:, :num_rotated])
    return expected


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 150])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "dtype"),
    [
        (9, 3, 64, 64, torch.bfloat16),
        (32, 8, 128, 128, torch.bfloat16),
        (16, 8, 128, 64, torch.float16),
        (4, 4, 96, 96, torch.bfloat16),
        (8, 1, 256, 256, torch.float16),
        (5, 5, 80, 20, torch.bfloat16),
        (6, 2, 64, 0, torch.float16),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_rope_kv_write(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, num_tokens: int, qk_norm: bool, dtype: torch.dtype,
    in_place: bool,
) -> None:  # fmt: skip
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, device="cuda", dtype=dtype)
    positions = torch.randint(0, 2000, (num_tokens,), device="cuda", dtype=torch.int32)
    slot_mapping = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device="cuda")[:num_tokens].int()
    norms = [torch.rand(head_dim, device="cuda", dtype=dtype) + 0.5 for _ in range(2)] if qk_norm else None
    expected = expected_qkv(qkv, positions, heads + kv_heads, rotary_dim, norms, heads)
    cache = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim), torch.nan, device="cuda", dtype=dtype)
    flat = qkv.view(num_tokens, -1).clone()
    queries = flat[:, : heads * head_dim] if in_place else torch.full_like(flat[:, : heads * head_dim], torch.nan)
    table = rotation_table(angles(rotary_dim).cos(), angles(rotary_dim).sin())
    kernel = RopeKvWrite(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, eps=EPS,
        qk_norm=qk_norm,
    )  # fmt: skip
    stream = torch.cuda.current_stream().cuda_stream
    kernel(stream, flat, queries, cache, table, positions, slot_mapping, *(norms or (None, None)))

    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(queries.float().view(num_tokens, heads, head_dim), expected[:, :heads], **tolerance)
    written = cache.view(2, -1, kv_heads, head_dim)[:, slot_mapping.long()].float()
    torch.testing.assert_close(written[0], expected[:, heads : heads + kv_heads], **tolerance)
    torch.testing.assert_close(written[1], expected[:, heads + kv_heads :], rtol=0, atol=0)
    assert int(cache.isfinite().sum()) == 2 * num_tokens * kv_heads * head_dim  # and nothing else


def test_fp8_cache_divides_by_the_scale_of_each_head() -> None:
    heads, kv_heads, head_dim, num_tokens = 8, 2, 128, 33
    qkv = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16) * 20
    positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
    scales = torch.tensor([[0.5, 0.02], [1.0, 0.25]], device="cuda")  # 0.02 is too small: it saturates
    cache = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim, device="cuda", dtype=torch.float8_e4m3fn)
    table = rotation_table(angles(head_dim).cos(), angles(head_dim).sin())
    expected = expected_qkv(qkv, positions, heads + kv_heads, head_dim, None, heads)[:, heads:].to(torch.bfloat16)
    kernel = RopeKvWrite(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=head_dim, dtype=torch.bfloat16,
        fp8_cache=True,
    )  # fmt: skip
    flat = qkv.view(num_tokens, -1)
    stream = torch.cuda.current_stream().cuda_stream
    kernel(stream, flat, flat, cache, table, positions, positions, cache_scales=scales)
    written = cache.float().view(2, -1, kv_heads, head_dim)[:, :num_tokens] * scales.view(2, 1, kv_heads, 1)
    limit = 448 * scales.view(2, 1, kv_heads, 1)
    wanted = expected.float().view(num_tokens, 2, kv_heads, head_dim).transpose(0, 1).clamp(-limit, limit)
    # e4m3 keeps three bits; steps below the smallest normal number are 2 ** -9.
    assert bool(((written - wanted).abs() <= wanted.abs() * 2**-4 * 1.1 + scales.view(2, 1, kv_heads, 1) * 2**-9).all())
