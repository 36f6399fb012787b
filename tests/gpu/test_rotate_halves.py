"""The rotation of queries and keys with given cosines and sines on the GPU, against float32 torch."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.rotate_halves import RotateHalves  # imports CuPy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (5, 5, 80), (8, 1, 256)])
def test_rotation(heads: int, kv_heads: int, head_dim: int, tokens: int, dtype: torch.dtype) -> None:
    packed = torch.randn(tokens, heads + kv_heads, head_dim, device="cuda", dtype=dtype)
    queries, keys = packed[:, :heads], packed[:, heads:]
    cosines, sines = torch.rand(2, tokens, head_dim, device="cuda", dtype=dtype).mul_(2).sub_(1).unbind()
    outs = [torch.full((tokens, count, head_dim), torch.nan, device="cuda", dtype=dtype) for count in (heads, kv_heads)]
    stream = torch.cuda.current_stream().cuda_stream
    RotateHalves(heads, kv_heads, head_dim, dtype)(stream, queries, keys, cosines, sines, *outs)
    for x, out in zip((queries.float(), keys.float()), outs, strict=True):
        low, high = x.chunk(2, dim=-1)
        expected = x * cosines.float()[:, None] + torch.cat((-high, low), dim=-1) * sines.float()[:, None]
        torch.testing.assert_close(out.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)
