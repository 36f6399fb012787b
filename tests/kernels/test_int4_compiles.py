"""The kernels of 4-bit matrices compile without spilling registers."""

from __future__ import annotations

import re

import pytest
import torch

from runner_svc.cuda.int4.dequantize import dequantize_defines
from runner_svc.cuda.int4.few_rows import product_defines
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.stream_variant import StreamVariant
from runner_svc.cuda.int4.wide_variant import WideVariant
from runner_svc.cuda.sources import kernel_folder
from tests.support.int4_cases import ADD, GATED, STORE
from tests.support.nvrtc import compile_kernel, toolkit_folder
from tests.support.thoroughness import choice

if toolkit_folder() is None:
    pytest.skip("needs the wheels of NVRTC", allow_module_level=True)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(tokens, blocks, tiles) for tokens in (1, 9, 30, 64, 128) for blocks in (1, 2) for tiles in (64, 96, 448)]


def compiled(name: str, arch: str, defines: dict[str, int | str], most_spilled: int = 0) -> str:
    """Returns the compiler's log. Allows some bytes that do not stay in registers."""
    macros = tuple(f"-D{key}={value}" for key, value in defines.items())
    code, log = compile_kernel(kernel_folder() / f"{name}.cu", arch, macros)
    assert code.startswith(b"\x7fELF")
    assert "warning" not in log, log
    assert "Potential Performance Loss" not in log, log
    assert int(re.findall(r"(\d+) bytes spill stores", log)[-1]) <= most_spilled, log
    return log


FORMATS = ((STORE, 128, BF16, False), (ADD, 64, F16, True), (GATED, 32, F32, True))


@pytest.mark.parametrize(
    ("shape", "epilogue", "group", "scale", "has_zeros"),
    choice(
        [(shape, *rest) for shape in SHAPES for rest in FORMATS],
        in_ci=[((1, 2, 64), *FORMATS[1]), ((64, 2, 448), *FORMATS[2])],
    ),
)
def test_products_of_few_rows(
    shape: tuple[int, int, int], epilogue: str, group: int, scale: torch.dtype, has_zeros: bool
) -> None:
    tokens, blocks, tiles = shape
    tile_bytes = 4096 + 128 // group * 64 * (scale.itemsize + has_zeros)
    variant = Int4Variant.choose(blocks, tokens, tiles, 32, tile_bytes)
    out = F32 if epilogue == STORE else BF16
    defines = product_defines(variant, epilogue, "silu", BF16, out, group, scale, has_zeros)
    compiled("int4_product", "sm_90a", defines)


@pytest.mark.parametrize(("tokens", "group"), choice([(8, 128), (8, 32), (16, 64), (16, 32)], in_ci=[(8, 128)]))
def test_products_by_warps(tokens: int, group: int) -> None:
    variant = Int4Variant(tokens, 1, 4, 1, 1, 4096 + 128 // group * 192, by_warps=True)
    defines = product_defines(variant, ADD, "silu", BF16, BF16, group, F16, True)
    compiled("int4_product", "sm_90a", defines)


@pytest.mark.parametrize(
    ("tiles", "form"), choice([(t, f) for t in (96, 448) for f in FORMATS], in_ci=[(448, FORMATS[2])])
)
def test_streams(tiles: int, form: tuple[str, int, torch.dtype, bool]) -> None:
    epilogue, group, scale, has_zeros = form
    variant = StreamVariant.choose(132, tiles, 32, 4096 + 128 // group * 64 * (scale.itemsize + has_zeros), epilogue)
    defines = product_defines(variant, epilogue, "silu", BF16, BF16, group, scale, has_zeros)
    compiled("int4_stream", "sm_90a", defines)


WIDE = [(tokens, form, tiles) for tokens in (64, 128, 256) for form in FORMATS for tiles in (64, 96, 448)]


@pytest.mark.parametrize(
    ("tokens", "form", "tiles"), choice(WIDE, in_ci=[(256, FORMATS[2], 448), (64, FORMATS[1], 64)])
)
def test_products_of_many_rows(tokens: int, form: tuple[str, int, torch.dtype, bool], tiles: int) -> None:
    """A block that has several tiles may keep some numbers elsewhere between them."""
    epilogue, group, scale, has_zeros = form
    tile_bytes = 4096 + 128 // group * 64 * (scale.itemsize + has_zeros)
    variant = WideVariant.choose(132, tokens, tiles, 32, tile_bytes, epilogue)
    defines = product_defines(variant, epilogue, "silu", BF16, BF16, group, scale, has_zeros)
    compiled("int4_wide", "sm_90a", defines, most_spilled=48 if variant.shares else 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_dequantization(arch: str) -> None:
    compiled("int4_dequantize", arch, dequantize_defines(BF16, 32, F16, arch == "sm_80"))
