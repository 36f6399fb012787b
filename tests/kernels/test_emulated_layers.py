"""The sources of the kernels of a layer's norms, activation and KV write, emulated on a CPU, against float32 torch."""

from __future__ import annotations

import shutil

import pytest
import torch

from runner_svc.arithmetic.plain import ACTIVATION_FUNCTIONS
from runner_svc.cuda.activation import ActivationMul
from runner_svc.cuda.norm import ResidualNorm
from runner_svc.cuda.rope_kv import RopeKvWrite
from runner_svc.model.families.description import NormKind, QkNorm
from tests.support.emulator.small import emulate_layers
from tests.support.norm_cases import EPS, NormCase, check_add, check_norm
from tests.support.rope_cases import EPS as ROPE_EPS
from tests.support.rope_cases import RopeCase, check_sums, check_write
from tests.support.thoroughness import FULL, choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CPU = torch.device("cpu")
NORMS = [
    NormCase(NormKind.RMS, 3, 264, torch.float16, multiplier=0.22),
    NormCase(NormKind.RMS_PLUS_ONE, 3, 264, torch.bfloat16, post=True),
    NormCase(NormKind.RMS, 2, 264, torch.float16, post=True, out=False),
    NormCase(NormKind.LAYER, 3, 4200, torch.bfloat16),  # some threads have two vectors
    NormCase(NormKind.LAYER, 2, 264, torch.float16, multiplier=0.5, post=True),
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_layers(monkeypatch)


@pytest.mark.parametrize("case", choice(NORMS, in_ci=NORMS[1:2]), ids=str)
def test_additions_and_norms(case: NormCase) -> None:
    launcher = ResidualNorm(
        case.hidden_size, case.dtype, EPS, case.kind, multiplier=case.multiplier, post_norms=case.post
    )
    check_add(launcher, case, CPU, 0)


@pytest.mark.parametrize("kind", choice(list(NormKind), in_ci=[NormKind.LAYER]))
def test_norms_alone(kind: NormKind) -> None:
    check_norm(ResidualNorm(264, torch.bfloat16, EPS, kind), NormCase(kind, 3, 264, torch.bfloat16), CPU, 0)


def rope_kernel(case: RopeCase) -> RopeKvWrite:
    return RopeKvWrite(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        rotary_dim=case.rotary_dim,
        dtype=case.dtype,
        eps=ROPE_EPS,
        qk_norm=case.qk_norm,
        plus_one=case.plus_one,
    )


ROPES = [
    RopeCase(4, 2, 64, 64, torch.bfloat16, 2, QkNorm.HEAD, plus_one=True),
    RopeCase(9, 3, 64, 64, torch.bfloat16, 2, QkNorm.PROJECTION),
    RopeCase(6, 2, 80, 20, torch.float16, 2, QkNorm.LAYER_HEAD),
    RopeCase(4, 2, 64, 0, torch.float16, 2, QkNorm.NONE),
]


@pytest.mark.parametrize("case", choice(ROPES, in_ci=ROPES[1:2]), ids=str)
def test_rotation_and_cache_write(case: RopeCase) -> None:
    for in_place in (False, True):
        check_write(rope_kernel, case, CPU, 0, in_place)


SUMS = [
    RopeCase(4, 2, 64, 64, torch.bfloat16, 2, QkNorm.NONE),
    RopeCase(5, 5, 80, 20, torch.bfloat16, 3, QkNorm.HEAD),
    RopeCase(4, 2, 64, 0, torch.float16, 2, QkNorm.LAYER_HEAD),
]


@pytest.mark.skipif(not FULL, reason="takes seconds: ROSTER_TEST_FULL=1 runs it, and tests/gpu has it")
@pytest.mark.parametrize("case", SUMS, ids=str)
def test_sums_are_scaled_before_they_are_rotated(case: RopeCase) -> None:
    check_sums(rope_kernel, case, CPU, 0)


@pytest.mark.parametrize("activation", choice(list(ACTIVATION_FUNCTIONS), in_ci=["mish"]))
def test_an_activation_without_a_gate(activation: str) -> None:
    up = torch.randn(3, 72).half() * 4
    out = torch.full_like(up, torch.nan)
    ActivationMul(72, torch.float16, activation, gated=False)(0, up, out)
    expected = ACTIVATION_FUNCTIONS[activation](up.float())
    torch.testing.assert_close(out.float(), expected, rtol=2 * torch.finfo(torch.float16).eps, atol=1e-5)
