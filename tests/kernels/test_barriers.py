"""No kernel releases shared memory before it has read it, a fault that neither tests nor compute-sanitizer would show.

For asynchronous copies, an arrival at an mbarrier is not ordered after loads from shared memory that are in flight. A
prefill of FP8 caches with this fault passed under memcheck and racecheck, and failed without them (bench/NOTES.md).

In CI the tests that compile these kernels anyway check their code, one of each kind: test_attention_compiles and
test_small_kernels_compile.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runner_svc.attention.cuda_kernels import AttentionShape, HopperPrefillVariant
from runner_svc.cuda.experts.expert_product import product_defines
from runner_svc.cuda.experts.expert_variant import ExpertVariant, TilesVariant
from runner_svc.cuda.int4.few_rows import product_defines as int4_defines
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.wide_variant import WideVariant
from runner_svc.cuda.products.gated_variant import GatedVariant
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.cuda.sources import kernel_folder
from tests.support.expert_cases import GPT_OSS
from tests.support.machine_code import arrivals_before_loads_are_done, instructions
from tests.support.nvrtc import compile_kernel, toolkit_folder
from tests.support.thoroughness import choice

if toolkit_folder() is None:
    pytest.skip("needs the wheels of NVRTC", allow_module_level=True)

GIVES_BACK = """
extern "C" __global__ void gives_back(const int* from, int* to) {
    __shared__ __align__(16) int data[128];
    __shared__ unsigned long long barrier;
    data[threadIdx.x] = from[threadIdx.x];
    __syncthreads();
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(&barrier)), word;
    unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(data + (threadIdx.x ^ 1)));
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(place) : "memory");
    FENCE
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    to[threadIdx.x] = word;
}
"""


def machine_code(name: str, defines: dict[str, int | str]) -> bytes:
    options = tuple(f"-D{key}={value}" for key, value in defines.items())
    return compile_kernel(kernel_folder() / f"{name}.cu", "sm_90a", options)[0]


@pytest.mark.parametrize(
    ("fence", "is_early"), [("", True), ('asm volatile("fence.proxy.async.shared::cta;");', False)]
)
def test_the_check_sees_it(fence: str, is_early: bool, tmp_path: Path) -> None:
    source = tmp_path / "gives_back.cu"
    source.write_text(GIVES_BACK.replace("FENCE", fence))
    code, _ = compile_kernel(source, "sm_90a")
    assert any("SYNCS.ARRIVE" in one.text for one in instructions(code))
    assert bool(arrivals_before_loads_are_done(code)) is is_early


@pytest.mark.parametrize(
    ("head_dim", "fp8_cache"),
    choice(
        [(64, False), (96, False), (128, False), (256, False), (64, True), (96, True), (128, True)],
        in_ci=[],
    ),
)
def test_prefill(head_dim: int, fp8_cache: bool) -> None:
    shape = AttentionShape("__nv_bfloat16", head_dim, 32, 8, 16, None, fp8_cache)
    assert HopperPrefillVariant.fits(shape)
    assert (
        arrivals_before_loads_are_done(machine_code("paged_prefill_hopper", HopperPrefillVariant(shape).defines)) == []
    )


@pytest.mark.parametrize(("tokens", "blocks"), choice([(1, 1), (30, 1), (64, 2), (128, 2)], in_ci=[]))
def test_skinny_products(tokens: int, blocks: int) -> None:
    variant = SkinnyVariant.choose(blocks, tokens, 4096, 4096)
    defines = variant.defines | {"EPILOGUE": "EPILOGUE_GATED", "OUT": "__nv_bfloat16", "ACTIVATION": "silu"}
    assert arrivals_before_loads_are_done(machine_code("skinny_product", defines)) == []


@pytest.mark.parametrize("tile", choice([(2, 48, 1, 2), (3, 96, 2, 1)], in_ci=[]))
def test_gated_products(tile: tuple[int, int, int, int]) -> None:
    defines = GatedVariant(*tile).defines | {"ACTIVATION": "silu", "SCALAR": "__nv_bfloat16"}
    assert arrivals_before_loads_are_done(machine_code("gated_product", defines)) == []


@pytest.mark.parametrize(
    "variant",
    choice(
        [
            ExpertVariant(8, 2),
            ExpertVariant(64, 2),
            TilesVariant(160),
            TilesVariant(160, claims=True),
            TilesVariant(160, gathers=True),
            TilesVariant(160, gathers=True, claims=True),
        ],
        in_ci=[],
    ),
    ids=str,
)
def test_expert_products(variant: ExpertVariant | TilesVariant) -> None:
    defines = product_defines(GPT_OSS, variant, torch.bfloat16, gated=True, early=True)
    assert arrivals_before_loads_are_done(machine_code(variant.kernel, defines)) == []


@pytest.mark.parametrize(
    ("tokens", "by_warps"), choice([(8, False), (8, True), (64, False), (128, False)], in_ci=[(8, True)])
)
def test_products_with_4_bit_matrices(tokens: int, by_warps: bool) -> None:
    variant = replace(Int4Variant.choose(1, tokens, 64, 32, 4352), by_warps=by_warps)
    bf16 = torch.bfloat16
    defines = int4_defines(variant, "EPILOGUE_STORE", "silu", bf16, bf16, 128, bf16, True)
    assert arrivals_before_loads_are_done(machine_code("int4_product", defines)) == []


@pytest.mark.parametrize("tokens", choice([64, 128], in_ci=[128]))
def test_many_rows_with_4_bit_matrices(tokens: int) -> None:
    variant, bf16 = WideVariant.choose(132, tokens, 64, 32, 4352, "EPILOGUE_STORE"), torch.bfloat16
    defines = int4_defines(variant, "EPILOGUE_STORE", "silu", bf16, bf16, 128, bf16, True)
    assert arrivals_before_loads_are_done(machine_code("int4_wide", defines)) == []
