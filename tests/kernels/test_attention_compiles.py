"""The attention kernels compile for every supported architecture, without spills in their inner loops."""

from __future__ import annotations

import pytest

from runner_svc.attention.cuda_kernels import (
    AttentionShape,
    DecodeVariant,
    HopperPrefillVariant,
    PrefillVariant,
)
from runner_svc.cuda.sources import kernel_folder
from tests.support.gpu_limits import SHARED_MEMORY
from tests.support.machine_code import arrivals_before_loads_are_done
from tests.support.nvrtc import compile_kernel, toolkit_folder
from tests.support.thoroughness import FULL, choice

if toolkit_folder() is None:
    pytest.skip("needs the wheels of NVRTC", allow_module_level=True)

# dtype, head_dim, heads, KV heads, block size, soft cap, FP8 cache, sinks
SHAPES = (
    ("__nv_bfloat16", 128, 32, 8, 16, None, False),
    ("__nv_bfloat16", 128, 32, 8, 16, 30.0, True),
    ("__half", 64, 9, 3, 32, 30.0, False),
    ("__half", 96, 32, 32, 16, None, True),
    ("__nv_bfloat16", 96, 24, 8, 32, 30.0, False),
    ("__nv_bfloat16", 96, 24, 8, 16, 30.0, True),
    ("__half", 256, 16, 8, 16, 50.0, False),
    ("__nv_bfloat16", 128, 40, 2, 16, None, False),
    ("__nv_bfloat16", 64, 64, 8, 16, None, False, True),
    ("__nv_bfloat16", 112, 32, 32, 16, None, False, True),
    ("__nv_bfloat16", 176, 16, 4, 16, None, False),
    ("__nv_bfloat16", 256, 16, 1, 16, None, True),
)
# By default Hopper's prefill is compiled for three head sizes, the other kernels for Hopper without a cap and with
# sinks, and for each architecture at the widest head; with ROSTER_TEST_FULL, all.
FOR_ALL = SHAPES[-1:]
ON_HOPPER = choice(SHAPES, in_ci=(SHAPES[0], SHAPES[-4], SHAPES[-1]))
FOR_HOPPER = [
    shape
    for shape in choice(SHAPES, in_ci=(SHAPES[0], SHAPES[5], SHAPES[-4]))
    if HopperPrefillVariant.fits(AttentionShape(*shape))
]
COMBINATIONS = [
    pytest.param(shape, arch, id="-".join(map(str, (*shape[1:], arch))))
    for shape in SHAPES
    for arch in SHARED_MEMORY
    if FULL or shape in (ON_HOPPER if arch == "sm_90a" else FOR_ALL)
]


def compile_variant(
    name: str, arch: str, variant: DecodeVariant | PrefillVariant | HopperPrefillVariant
) -> tuple[bytes, str]:
    defines = tuple(f"-D{key}={value}" for key, value in variant.defines.items())
    code, log = compile_kernel(kernel_folder() / f"{name}.cu", arch, defines)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    return code, log


@pytest.mark.parametrize(("shape", "arch"), COMBINATIONS)
def test_decode_compiles(shape: tuple, arch: str) -> None:
    for small_batch in (True, False):
        variant = DecodeVariant.choose(AttentionShape(*shape), SHARED_MEMORY[arch], small_batch)
        assert " 0 bytes spill stores" in compile_variant("paged_decode", arch, variant)[1]


@pytest.mark.parametrize(
    ("shape", "arch", "positions", "small_batch"),
    choice(
        [
            (shape, arch, positions, small_batch)
            for shape in SHAPES
            for arch in SHARED_MEMORY
            for positions in (1, 2, 3, 4, 6, 8)
            for small_batch in (True, False)
        ],
        in_ci=[(SHAPES[0], "sm_90a", 6, False)],
    ),
)
def test_verify_compiles(shape: tuple, arch: str, positions: int, small_batch: bool) -> None:
    variant = DecodeVariant.choose(AttentionShape(*shape), SHARED_MEMORY[arch], small_batch, positions)
    assert " 0 bytes spill stores" in compile_variant("paged_decode", arch, variant)[1]


@pytest.mark.parametrize("shape", FOR_HOPPER, ids=str)
def test_decode_beside_prefill_compiles(shape: tuple) -> None:
    variant = DecodeVariant.choose_beside_prefill(AttentionShape(*shape), SHARED_MEMORY["sm_90a"])
    assert " 0 bytes spill stores" in compile_variant("paged_decode", "sm_90a", variant)[1]


@pytest.mark.parametrize(("shape", "arch"), COMBINATIONS)
def test_prefill_compiles(shape: tuple, arch: str) -> None:
    _, log = compile_variant("paged_prefill", arch, PrefillVariant(AttentionShape(*shape)))
    if shape[1] < 256:  # queries and outputs of 256 fill the registers, and a few spill
        assert " 0 bytes spill stores" in log, log


@pytest.mark.parametrize("shape", FOR_HOPPER, ids=str)
def test_hopper_prefill_compiles_without_serialized_products(shape: tuple) -> None:
    code, log = compile_variant("paged_prefill_hopper", "sm_90a", HopperPrefillVariant(AttentionShape(*shape)))
    assert "Potential Performance Loss" not in log, log
    assert " 0 bytes spill stores" in log, log
    if FULL or shape in (SHAPES[0], SHAPES[5]):  # with and without an FP8 cache; see test_barriers
        assert arrivals_before_loads_are_done(code) == []
