"""The other kernels compile for every supported architecture without spilling registers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from runner_svc.cuda.canonical.many_variant import ManyVariant
from runner_svc.cuda.experts.expert_entry import entry_defines, split_of
from runner_svc.cuda.experts.expert_product import product_defines
from runner_svc.cuda.experts.expert_routing import routing_defines
from runner_svc.cuda.experts.expert_variant import JOB_ROWS, TILE_JOB_ROWS, ExpertVariant, TilesVariant
from runner_svc.cuda.fp8.many_variant import Fp8ManyVariant
from runner_svc.cuda.fp8.variant import Fp8Variant
from runner_svc.cuda.products.gated_variant import GatedVariant
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.cuda.products.split_variant import SplitVariant
from runner_svc.cuda.sources import kernel_folder
from runner_svc.interface.products.skinny_launchers import MAX_ROUTED
from runner_svc.model.families.experts_config import ExpertsConfig
from tests.support.expert_cases import GPT_OSS, GROUPED, QWEN
from tests.support.machine_code import arrivals_before_loads_are_done
from tests.support.nvrtc import compile_kernel, toolkit_folder
from tests.support.thoroughness import choice, in_turn

if toolkit_folder() is None:
    pytest.skip("needs the wheels of NVRTC", allow_module_level=True)

BF16, HALF = "-DSCALAR=__nv_bfloat16", "-DSCALAR=__half"
NO_FP8 = "-DFP8_CACHE=0"


def macros(defines: dict[str, int | str]) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in defines.items())


def rope(head_dim: int, rotary_dim: int, vector: int, lanes: int, *flags: str) -> tuple[str, ...]:
    names = ("HEADS", "KV_HEADS", "HEAD_DIM", "ROTARY_DIM", "VECTOR", "LANES")
    values = (32, 8, head_dim, rotary_dim, vector, lanes)
    return tuple(f"-D{name}={value}" for name, value in zip(names, values, strict=True)) + flags


def residual_norm(kind: int, add: int, post: int, out: int) -> tuple[str, ...]:
    values = {"HIDDEN_SIZE": 4608, "VECTORS": 2, "KIND": kind, "ADD": add, "POST": post, "OUT": out}
    return tuple(f"-D{name}={value}" for name, value in values.items())


CASES = {
    "norm": ("add_rms_norm", (BF16, "-DHIDDEN_SIZE=4096", "-DVECTORS=1", "-DADD=1")),
    "norm-odd": ("add_rms_norm", (HALF, "-DHIDDEN_SIZE=576", "-DVECTORS=1", "-DADD=0")),
    "residual-norm": ("residual_norm", (HALF, *residual_norm(kind=0, add=1, post=0, out=1), "-DMULTIPLIER=0.22f")),
    "norm-around": ("residual_norm", (BF16, *residual_norm(kind=1, add=1, post=1, out=1), "-DMULTIPLIER=1.0f")),
    "norm-after": ("residual_norm", (BF16, *residual_norm(kind=0, add=1, post=1, out=0), "-DMULTIPLIER=1.0f")),
    "layer-norm": ("residual_norm", (BF16, *residual_norm(kind=2, add=1, post=0, out=1), "-DMULTIPLIER=1.0f")),
    "layer-norm-first": ("residual_norm", (HALF, *residual_norm(kind=2, add=0, post=0, out=1), "-DMULTIPLIER=1.0f")),
    "silu": ("silu_mul", (BF16, "-DSIZE=14336", "-DACTIVATION=silu")),
    "gelu": ("silu_mul", (HALF, "-DSIZE=1536", "-DACTIVATION=gelu_tanh")),
    "relu-no-gate": ("silu_mul", (HALF, "-DSIZE=3072", "-DACTIVATION=relu", "-DGATED=0")),
    "rope-plus-one": ("rope_kv_write", (BF16, *rope(256, 256, 8, 16, "-DQK_NORM=1", "-DQK_PLUS_ONE=1", NO_FP8))),
    "rope-projection": ("rope_kv_write", (BF16, *rope(128, 128, 8, 8, "-DQK_NORM=2", NO_FP8))),
    "rope-layer-norm": ("rope_kv_write", (HALF, *rope(128, 128, 8, 8, "-DQK_NORM=3", "-DFP8_CACHE=1"))),
    "rope-128": ("rope_kv_write", (BF16, *rope(128, 128, 8, 8, "-DQK_NORM=1", "-DFP8_CACHE=0"))),
    "rope-sums": ("rope_kv_write", (BF16, *rope(128, 128, 8, 8, "-DQK_NORM=0", "-DFP8_CACHE=1", "-DSCALED=1"))),
    "rope-96-fp8": ("rope_kv_write", (HALF, *rope(96, 96, 8, 8, "-DQK_NORM=0", "-DFP8_CACHE=1"))),
    "rope-80-partial": ("rope_kv_write", (BF16, *rope(80, 20, 2, 32, "-DQK_NORM=1", "-DFP8_CACHE=0"))),
    "rope-80-partial-fp8": ("rope_kv_write", (BF16, *rope(80, 20, 2, 32, "-DQK_NORM=1", "-DFP8_CACHE=1"))),
    "rope-64-plain-fp8": ("rope_kv_write", (HALF, *rope(64, 0, 8, 4, "-DQK_NORM=0", "-DFP8_CACHE=1"))),
    "rope-256-fp8": ("rope_kv_write", (BF16, *rope(256, 256, 8, 16, "-DQK_NORM=1", "-DFP8_CACHE=1"))),
    "rotate-halves": ("rotate_halves", (BF16, "-DHEADS=32", "-DKV_HEADS=8", "-DHEAD_DIM=128")),
    "rotate-halves-odd": ("rotate_halves", (HALF, "-DHEADS=9", "-DKV_HEADS=3", "-DHEAD_DIM=80")),
    "embed": ("embed", (BF16, "-DWIDTH=4096")),
    "embed-part": ("embed_part", (BF16, "-DWIDTH=4096")),
    "one-shot-reduce": ("one_shot_reduce", (BF16, "-DRANKS=8", "-DTHREADS=512")),
    "one-shot-gather": ("one_shot_gather", ("-DVECTOR=4", "-DRANKS=2", "-DTHREADS=512")),
    "canonical-take": ("canonical_residual", ("-DCANONICAL=1", "-DENDS=ENDS_TAKE", "-DPARTS=1")),
    "canonical-add": ("canonical_residual", ("-DCANONICAL=1", "-DENDS=ENDS_RESIDUAL", "-DPARTS=2")),
    "log-softmax": ("log_softmax", ("-DCANONICAL=1", "-DLOGIT=float", "-DVOCAB=151936")),
    "expert-routing": ("expert_routing", macros(routing_defines(QWEN))),
    "expert-routing-groups": ("expert_routing", macros(routing_defines(GROUPED))),
    "expert-rows": (
        "expert_rows",
        (BF16, "-DWIDTH=2880", "-DTOP_K=4", "-DBIAS=1", "-DCLAMPED=1", "-DALPHA=1.702f", "-DLIMIT=7.0f"),
    ),
    "fp8-rows": ("fp8_rows", ("-DWIDTH=14336", "-DVECTORS=2", "-DGROUPED=0", "-DSTATIC=0", "-DGATED=0")),
    "fp8-rows-groups": ("fp8_rows", ("-DWIDTH=400", "-DVECTORS=1", "-DGROUPED=1", "-DSTATIC=0", "-DGATED=0")),
    "fp8-rows-static": ("fp8_rows", ("-DWIDTH=4096", "-DVECTORS=1", "-DGROUPED=0", "-DSTATIC=1", "-DGATED=0")),
    "fp8-rows-gated": (
        "fp8_rows",
        ("-DWIDTH=14336", "-DVECTORS=2", "-DGROUPED=0", "-DSTATIC=0", "-DGATED=1", "-DACTIVATION=silu"),
    ),
    "fp8-rows-gated-groups": (
        "fp8_rows",
        ("-DWIDTH=14336", "-DVECTORS=2", "-DGROUPED=1", "-DSTATIC=0", "-DGATED=2", "-DACTIVATION=silu"),
    ),
    "fp8-norm": ("fp8_norm", ("-DWIDTH=4096", "-DVECTORS=1", "-DADD=1", "-DSCALED=1", "-DGROUPED=0", "-DSTATIC=0")),
    "fp8-norm-groups": (
        "fp8_norm",
        ("-DWIDTH=12288", "-DVECTORS=2", "-DADD=0", "-DSCALED=0", "-DGROUPED=1", "-DSTATIC=0"),
    ),
    "fp8-scale": (
        "fp8_scale",
        ("-DWIDTH=6144", "-DRAW=float", "-DOUT=float", "-DGATED=0", "-DBIAS=1", "-DACTIVATION=silu"),
    ),
    "fp8-scale-gated": (
        "fp8_scale",
        ("-DWIDTH=28672", "-DRAW=__nv_bfloat16", "-DOUT=__nv_bfloat16", "-DGATED=1", "-DBIAS=0", "-DACTIVATION=silu"),
    ),
    "gather": ("gather_inputs", ()),
    "scatter": ("scatter_segments", ()),
    "gather-blocks": ("move_blocks", ("-DTHREADS=512", "-DUNROLL=4", "-DGATHER=1")),
    "scatter-blocks": ("move_blocks", ("-DTHREADS=512", "-DUNROLL=4", "-DGATHER=0")),
    "ngram": ("ngram_draft", ("-DTHREADS=512", "-DMOST=8", "-DWINDOW=8192")),
    "place-drafts": ("place_drafts", ()),
    "gather-drafted": ("gather_drafted", ()),
    "expand-records": ("expand_records", ()),
    "accept-drafts": ("accept_drafts", ()),
    "copy": ("copy_words", ()),
    "adjust": ("adjust_logits", ("-DLOGIT=__nv_bfloat16", "-DVOCAB=49152")),
    "sample": ("sample", ("-DLOGIT=float", "-DVOCAB=151936")),
}
EVERYWHERE = [(case, arch) for arch in ("sm_80", "sm_90a", "sm_100") for case in CASES]
FIRST = {name: case for case, (name, _) in reversed(CASES.items()) if name != "sample"}
"""One case of each kernel; `sample` takes as long to compile as all others together."""
OTHER = in_turn(["sm_80", "sm_100"], in_ci=1)
RARE = (
    "fp8-rows",
    "fp8-rows-groups",
    "fp8-rows-static",
    "fp8-rows-gated-groups",
    "fp8-norm-groups",
    "fp8-scale",
    "fp8-scale-gated",
)
"""Variants of kernels of which another is among the cases."""


# In CI each case is compiled for Hopper, but for rare ones, and each kernel once for another architecture in turn.
@pytest.mark.parametrize(
    ("case", "arch"),
    choice(
        EVERYWHERE,
        in_ci=[
            (case, arch)
            for case, arch in EVERYWHERE
            if (arch == "sm_90a" and (case not in RARE or case in FIRST.values()))
            or (case in FIRST.values() and arch in OTHER)
        ],
    ),
)
def test_compiles(case: str, arch: str) -> None:
    name, defines = CASES[case]
    code, log = compile_kernel(kernel_folder() / f"{name}.cu", arch, defines)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    if name != "sample":  # it is limited to 64 registers, and spills a few words outside of the hot loops
        assert " 0 bytes spill stores" in log, log


SKINNY = [(1, 1), (9, 2), (30, 1), (64, 2), (128, 1), (128, 2)]
EPILOGUES = ("STORE", "GATED", "RESIDUAL")


@pytest.mark.parametrize(
    ("tokens", "blocks", "epilogue"),
    choice(
        [(*shape, epilogue) for shape in SKINNY for epilogue in EPILOGUES],
        in_ci=[(*shape, EPILOGUES[place % 3]) for place, shape in enumerate(SKINNY)],  # each shape and each epilogue
    ),
)
def test_skinny_products_compile_for_hopper(tokens: int, blocks: int, epilogue: str) -> None:
    variant = SkinnyVariant.choose(blocks, tokens, 4096, 4096)
    defines = variant.defines | {"EPILOGUE": f"EPILOGUE_{epilogue}", "OUT": "__nv_bfloat16", "ACTIVATION": "silu"}
    options = tuple(f"-D{key}={value}" for key, value in defines.items())
    code, log = compile_kernel(kernel_folder() / "skinny_product.cu", "sm_90a", options)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert " 0 bytes spill stores" in log, log
    if (tokens, blocks) in ((9, 2), (128, 1)):  # see test_barriers
        assert arrivals_before_loads_are_done(code) == []
    assert variant.shared_bytes <= (228 << 10) // blocks - 1024
    assert variant.stages >= 3


FP8 = [(1, 1), (1, 2), (9, 2), (30, 1), (64, 1), (128, 1)]


@pytest.mark.parametrize(
    ("tokens", "blocks", "epilogue", "grouped"),
    choice(
        [(*shape, epilogue, grouped) for shape in FP8 for epilogue in EPILOGUES for grouped in (False, True)],
        in_ci=[(64, 1, "RESIDUAL", True)],
    ),
)
def test_fp8_products_compile_for_hopper(tokens: int, blocks: int, epilogue: str, grouped: bool) -> None:
    rows = 28672 if epilogue == "GATED" else 4096
    variant = Fp8Variant.choose(blocks, tokens, rows, 4096, grouped=grouped)
    defines = variant.defines | {
        "STATIC": 0,
        "EPILOGUE": f"EPILOGUE_{epilogue}",
        "OUT": "__nv_bfloat16",
        "ACTIVATION": "silu",
    }
    code, log = compile_kernel(kernel_folder() / "fp8_product.cu", "sm_90a", macros(defines))
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert "Potential Performance Loss" not in log, log
    assert " 0 bytes spill stores" in log, log
    assert variant.shared_bytes <= (228 << 10) // blocks - 1024
    assert variant.stages >= 3
    assert arrivals_before_loads_are_done(code) == []  # see test_barriers


MANY = [
    Fp8ManyVariant(112, True, False),
    Fp8ManyVariant(112, True, False, cluster_rows=2),
    Fp8ManyVariant(128, False, False, split=2),
    Fp8ManyVariant(128, False, True, split=2),
]


@pytest.mark.parametrize("variant", choice(MANY, in_ci=MANY[-1:]), ids=str)
def test_fp8_products_of_many_rows_compile_for_hopper(variant: Fp8ManyVariant) -> None:
    defines = variant.defines | ({"ACTIVATION": "gelu_tanh"} if variant.gated else {})
    code, log = compile_kernel(kernel_folder() / "fp8_many.cu", "sm_90a", macros(defines))
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert "Potential Performance Loss" not in log, log
    assert " 0 bytes spill stores" in log, log
    assert variant.shared_bytes <= 227 << 10
    assert arrivals_before_loads_are_done(code) == []


@pytest.mark.parametrize(
    ("tile", "cluster", "scalar", "activation"),
    [
        ((2, 48), (1, 2), HALF, "silu"),
        ((2, 80), (1, 1), BF16, "gelu"),
        ((2, 112), (2, 1), BF16, "gelu_tanh"),
        ((2, 128), (2, 1), BF16, "silu"),
        ((3, 96), (2, 1), BF16, "silu"),
        ((3, 112), (1, 2), HALF, "silu"),
    ],
)
def test_gated_products_compile_for_hopper_without_serialized_products(
    tile: tuple[int, int], cluster: tuple[int, int], scalar: str, activation: str
) -> None:
    defines = GatedVariant(*tile, *cluster).defines | {"ACTIVATION": activation}
    options = (scalar, *(f"-D{key}={value}" for key, value in defines.items()))
    code, log = compile_kernel(kernel_folder() / "gated_product.cu", "sm_90a", options)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert "Potential Performance Loss" not in log, log
    assert " 0 bytes spill stores" in log, log
    if tile == (2, 128):  # see test_barriers
        assert arrivals_before_loads_are_done(code) == []


@pytest.mark.parametrize(
    ("ends", "out", "tile", "parts", "split"),
    choice(
        [
            ("GATED", "__nv_bfloat16", (2, 128), 1, 1),
            ("GATED", "__nv_bfloat16", (2, 128), 2, 1),
            ("STORE", "__nv_bfloat16", (2, 128), 2, 1),
            ("STORE", "__nv_bfloat16", (2, 96), 1, 2),
            ("STORE", "float", (2, 128), 1, 1),
            ("RESIDUAL", "__nv_bfloat16", (2, 128), 2, 1),
            ("RESIDUAL", "__nv_bfloat16", (2, 64), 1, 2),
        ],
        in_ci=[("RESIDUAL", "__nv_bfloat16", (2, 128), 2, 1)],
    ),
)
def test_canonical_products_of_many_rows_compile_for_hopper(
    ends: str, out: str, tile: tuple[int, int], parts: int, split: int
) -> None:
    variant = ManyVariant(GatedVariant(*tile, 2, 1), parts, split)
    defines = variant.defines | {"ACTIVATION": "silu", "CANONICAL": 1, "ENDS": f"ENDS_{ends}", "OUT": out}
    code, log = compile_kernel(kernel_folder() / "canonical_product.cu", "sm_90a", (BF16, *macros(defines)))
    assert "warning" not in log, log
    assert "Potential Performance Loss" not in log, log
    # What is added to the residual stream is loaded beside all sums.
    assert int(re.findall(r"(\d+) bytes spill stores", log)[0]) <= (16 if ends == "RESIDUAL" else 0), log
    assert arrivals_before_loads_are_done(code) == []  # see test_barriers


@pytest.mark.parametrize(
    ("tokens", "split", "parts"), choice([(8, 2, 1), (128, 2, 1), (128, 1, 2)], in_ci=[(128, 1, 2)])
)
def test_canonical_products_of_few_rows_compile_for_hopper(tokens: int, split: int, parts: int) -> None:
    variant = SkinnyVariant(tokens, split, 2, parts, canonical=True)
    defines = variant.defines | {"EPILOGUE": "EPILOGUE_RESIDUAL", "OUT": "__nv_bfloat16", "ACTIVATION": "silu"}
    code, log = compile_kernel(kernel_folder() / "skinny_product.cu", "sm_90a", macros(defines))
    assert "warning" not in log, log
    assert " 0 bytes spill stores" in log, log
    assert arrivals_before_loads_are_done(code) == []


EXPERT_VARIANTS = (
    *(ExpertVariant(rows, 1 if rows == 128 else 2) for rows in JOB_ROWS),
    *(TilesVariant(rows, gathers) for rows in TILE_JOB_ROWS for gathers in (False, True)),
    *(TilesVariant(rows, claims=True) for rows in TILE_JOB_ROWS),
    TilesVariant(160, gathers=True, claims=True),
)


@pytest.mark.parametrize(
    ("variant", "gated", "config"),
    choice(
        [
            (variant, gated, config)
            for variant in EXPERT_VARIANTS
            for gated in (False, True)
            for config in (QWEN, GPT_OSS)
        ],
        in_ci=[
            (ExpertVariant(32, 2), True, GPT_OSS),
            (TilesVariant(160, claims=True), True, QWEN),
        ],
    ),
    ids=str,
)
def test_expert_products_compile_for_hopper(
    variant: ExpertVariant | TilesVariant, gated: bool, config: ExpertsConfig
) -> None:
    defines = product_defines(
        config, variant, torch.bfloat16, gated=gated, early=not gated, scaled=gated and not variant.gathers
    )
    options = tuple(f"-D{key}={value}" for key, value in defines.items())
    code, log = compile_kernel(kernel_folder() / f"{variant.kernel}.cu", "sm_90a", options)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert "Potential Performance Loss" not in log, log
    assert " 0 bytes spill stores" in log, log
    if isinstance(variant, TilesVariant):  # see test_barriers
        assert arrivals_before_loads_are_done(code) == []
    assert variant.shared_bytes <= (228 << 10) // variant.blocks - 1024
    assert variant.stages >= 4


@pytest.mark.parametrize(
    "variant",
    choice(
        [SplitVariant(64, 2), SplitVariant(160, 4), SplitVariant(256, 2), SplitVariant(192, 2, 3)],
        in_ci=[SplitVariant(192, 2, 3)],
    ),
    ids=str,
)
def test_split_products_compile_for_hopper(variant: SplitVariant) -> None:
    options = (BF16, "-DADDING=1", *(f"-D{key}={value}" for key, value in variant.defines.items()))
    code, log = compile_kernel(kernel_folder() / "split_product.cu", "sm_90a", options)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert "Potential Performance Loss" not in log, log
    assert " 0 bytes spill stores" in log, log
    assert arrivals_before_loads_are_done(code) == []


@pytest.mark.parametrize(("config", "split"), choice([(QWEN, 4), (GROUPED, 8)], in_ci=[(QWEN, 4)]), ids=str)
def test_expert_entry_compiles_for_hopper(config: ExpertsConfig, split: int) -> None:
    config = replace(config, num_experts=128, top_k=8)
    assert [split_of(config, width) for width in (2048, 4096, 2880, 8192)] == [4, 8, None, None]
    options = tuple(f"-D{key}={value}" for key, value in entry_defines(config, 2048, torch.bfloat16, split).items())
    code, log = compile_kernel(kernel_folder() / "expert_entry.cu", "sm_90a", options)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert " 0 bytes spill stores" in log, log


def test_kernels_of_a_lone_row_compile_for_hopper() -> None:
    config = replace(GPT_OSS, num_experts=MAX_ROUTED)
    products = product_defines(config, ExpertVariant(32, 2), torch.bfloat16, gated=True, early=False, routes=True)
    before = SkinnyVariant.choose(2, 1, 2048, 4096).defines | {"EPILOGUE": "EPILOGUE_RESIDUAL", "EXPERTS": MAX_ROUTED}
    before |= {"OUT": "__nv_bfloat16", "ACTIVATION": "silu"}
    for name, defines in (("expert_product", products), ("skinny_product", before)):
        options = tuple(f"-D{key}={value}" for key, value in defines.items())
        code, log = compile_kernel(kernel_folder() / f"{name}.cu", "sm_90a", options)
        assert code.startswith(b"\x7fELF")
        assert "warning" not in log, log
        assert "Potential Performance Loss" not in log, log
        assert " 0 bytes spill stores" in log, log


def test_an_error_is_reported_with_its_line() -> None:
    with pytest.raises(RuntimeError, match=r"silu_mul\.cu\(\d+\): error"):
        compile_kernel(kernel_folder() / "silu_mul.cu", "sm_90a", (BF16, "-DSIZE=64", "-DACTIVATION=swoosh"))
