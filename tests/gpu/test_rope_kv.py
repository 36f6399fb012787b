"""QK-norm, rotation and KV write on the GPU against the CPU decoder's parts in float32."""

from __future__ import annotations

import pytest
import torch

from runner_svc.model.families.description import QkNorm
from tests.support.rope_cases import EPS, SHAPES, RopeCase, check_fp8_write, check_sums, check_write

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.rope_kv import RopeKvWrite  # imports CuPy

DEVICE = torch.device("cuda")
FP8_SHAPES = [
    *SHAPES,
    (32, 8, 128, 128, torch.float16),
    (9, 3, 64, 64, torch.float16),
    (4, 4, 96, 96, torch.float16),
    (8, 2, 256, 256, torch.bfloat16),
]


def kernel(case: RopeCase, fp8_cache: bool = False) -> RopeKvWrite:
    return RopeKvWrite(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        rotary_dim=case.rotary_dim,
        dtype=case.dtype,
        eps=EPS,
        qk_norm=case.qk_norm,
        plus_one=case.plus_one,
        fp8_cache=fp8_cache,
    )


def fp8_kernel(case: RopeCase) -> RopeKvWrite:
    return kernel(case, fp8_cache=True)


@pytest.mark.parametrize("qk_norm", QkNorm)
@pytest.mark.parametrize("num_tokens", [1, 7, 150])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_rope_kv_write(shape: tuple, num_tokens: int, qk_norm: QkNorm, in_place: bool) -> None:
    case = RopeCase(*shape, num_tokens=num_tokens, qk_norm=qk_norm, plus_one=qk_norm is QkNorm.HEAD and num_tokens > 1)
    check_write(kernel, case, DEVICE, torch.cuda.current_stream().cuda_stream, in_place)


@pytest.mark.parametrize("qk_norm", [QkNorm.NONE, QkNorm.HEAD, QkNorm.LAYER_HEAD])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_a_product(shape: tuple, qk_norm: QkNorm) -> None:
    case = RopeCase(*shape, num_tokens=70, qk_norm=qk_norm)
    check_sums(kernel, case, DEVICE, torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("qk_norm", QkNorm)
@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_fp8_cache_divides_by_the_scale_of_each_head(shape: tuple, num_tokens: int, qk_norm: QkNorm) -> None:
    case = RopeCase(*shape, num_tokens=num_tokens, qk_norm=qk_norm, plus_one=qk_norm is QkNorm.HEAD and num_tokens > 1)
    check_fp8_write(fp8_kernel, case, DEVICE, torch.cuda.current_stream().cuda_stream)
