"""The attention kernels of the canonical order compile for every supported architecture, with few or no spills."""

from __future__ import annotations

import re

import pytest

from runner_svc.attention.canonical_gpu.variants import (
    CanonicalDecodeVariant,
    CanonicalHopperVariant,
    CanonicalPrefillVariant,
)
from runner_svc.attention.cuda_kernels import AttentionShape
from runner_svc.cuda.sources import kernel_folder
from tests.support.gpu_limits import SHARED_MEMORY
from tests.support.machine_code import arrivals_before_loads_are_done
from tests.support.nvrtc import compile_kernel, toolkit_folder
from tests.support.thoroughness import choice

if toolkit_folder() is None:
    pytest.skip("needs the wheels of NVRTC", allow_module_level=True)

# dtype, head_dim, heads, KV heads, block size, soft cap, FP8 cache, sinks
SHAPES = [
    ("__nv_bfloat16", head_dim, *heads, 16, soft_cap, fp8_cache, sinks)
    for head_dim in (64, 96, 128)
    for heads in ((32, 8), (32, 32))
    for soft_cap, sinks in ((None, False), (30.0, True))
    for fp8_cache in (False, True)
]
PLAIN = ("__nv_bfloat16", 128, 32, 8, 16, None, False, False)


def spilled(
    name: str, arch: str, variant: CanonicalDecodeVariant | CanonicalPrefillVariant | CanonicalHopperVariant
) -> tuple[int, bytes]:
    """Returns the bytes that a variant spills, and its code."""
    defines = tuple(f"-D{key}={value}" for key, value in variant.defines.items())
    code, log = compile_kernel(kernel_folder() / f"{name}.cu", arch, defines)
    assert "warning" not in log and "Potential Performance Loss" not in log, log
    return max(map(int, re.findall(r"(\d+) bytes spill stores", log))), code


@pytest.mark.parametrize("positions", choice([0, 1, 2, 4, 6, 8], in_ci=[0]))
@pytest.mark.parametrize("arch", choice(list(SHARED_MEMORY), in_ci=["sm_90a"]))
@pytest.mark.parametrize("shape", choice(SHAPES, in_ci=[PLAIN]), ids=str)
def test_decode(shape: tuple, arch: str, positions: int) -> None:
    variant = CanonicalDecodeVariant.choose(AttentionShape(*shape), SHARED_MEMORY[arch], positions)
    # With many queries of 128 elements, what was folded of the segments before does not stay in registers.
    most = 320 if variant.columns > 16 and shape[1] == 128 else 0
    assert spilled("canonical_decode", arch, variant)[0] <= most


@pytest.mark.parametrize("arch", choice(list(SHARED_MEMORY), in_ci=[]))
@pytest.mark.parametrize("shape", choice(SHAPES, in_ci=[]), ids=str)
def test_prefill_for_any_gpu(shape: tuple, arch: str) -> None:
    most = 160 if shape[1] == 128 else 0  # outputs of a segment and those before take half of the registers
    assert spilled("canonical_prefill", arch, CanonicalPrefillVariant(AttentionShape(*shape)))[0] <= most


@pytest.mark.parametrize("shape", choice(SHAPES, in_ci=[PLAIN]), ids=str)
def test_prefill_for_hopper(shape: tuple) -> None:
    most = 64 if shape[1] == 128 and shape[6] else 0
    bytes_spilled, code = spilled("paged_prefill_hopper", "sm_90a", CanonicalHopperVariant(AttentionShape(*shape)))
    assert bytes_spilled <= most
    assert arrivals_before_loads_are_done(code) == []
