"""Variants of 4-bit products with one block on each multiprocessor: sizes that fit, and what depends on the matrix."""

from __future__ import annotations

import pytest

from runner_svc.cuda.int4.choice import MOST_STRIP_ROWS, lone_block
from runner_svc.cuda.int4.int4_variant import total_parts
from runner_svc.cuda.int4.strips_variant import StripsVariant
from runner_svc.cuda.int4.wide_variant import WideVariant

BLOCK_BYTES, HALF_BYTES = 227 << 10, (228 << 10) // 2 - (1 << 10)
LARGEST_TILE = 4096 + 4 * 64 * 5
"""Bytes of a tile with groups of 32, scales in float32 and zeros."""
MATRICES = [(64, 32), (448, 32), (64, 112), (96, 32), (9, 5), (1, 1), (1792, 64)]
EPILOGUES = ["EPILOGUE_STORE", "EPILOGUE_GATED", "EPILOGUE_RESIDUAL"]


@pytest.mark.parametrize("tile_bytes", [4224, LARGEST_TILE])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("tiles", "steps"), MATRICES)
def test_strips_fit_into_half_a_multiprocessor(tiles: int, steps: int, epilogue: str, tile_bytes: int) -> None:
    for tokens in (1, 8, 9, 16, 32):
        found = StripsVariant.choose(132, tokens, tiles, steps, tile_bytes, epilogue)
        if found is None:
            assert tokens > 16 or tile_bytes == LARGEST_TILE
            continue
        assert found.tokens >= tokens
        assert found.parts == total_parts(tiles, steps)
        assert found.parts % found.at_once == 0
        assert found.stages >= 2
        assert found.shared_bytes <= HALF_BYTES
        assert found.threads <= 1024
        assert found.grid(tiles, 132, tokens) * found.strips >= tiles * 4
        assert epilogue != "EPILOGUE_GATED" or found.strips % 2 == 0
        assert epilogue != "EPILOGUE_RESIDUAL" or 32 % (found.outputs // 4) == 0
        assert epilogue != "EPILOGUE_RESIDUAL" or found.outputs >= 32


@pytest.mark.parametrize("tile_bytes", [4224, LARGEST_TILE])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("tiles", "steps"), MATRICES)
def test_wide_blocks_fit(tiles: int, steps: int, epilogue: str, tile_bytes: int) -> None:
    for tokens in (17, 64, 65, 128, 300):
        found = WideVariant.choose(132, tokens, tiles, steps, tile_bytes, epilogue)
        inputs, numbers, codes = (found.defines[f"{ring}_STAGES"] for ring in ("INPUT", "NUMBER", "CODE"))
        assert min(inputs, numbers, codes) >= 2
        assert found.shared_bytes <= BLOCK_BYTES
        assert found.sum_bytes <= found.shared_bytes - found.tokens * 4 - (inputs + numbers + codes) * 16
        assert found.threads in (384, 512)
        assert found.split <= steps
        assert found.grid(tiles, 132, tokens) == -(-tiles * 4 // found.strips) * found.split * -(
            -tokens // found.tokens
        )
        assert epilogue != "EPILOGUE_GATED" or found.strips % 2 == 0
        assert epilogue != "EPILOGUE_RESIDUAL" or 32 % (found.outputs // 4) == 0


def test_matrices_of_8b_have_a_block_on_each_of_128_multiprocessors() -> None:
    for tiles, steps, epilogue in ((96, 32, EPILOGUES[0]), (448, 32, EPILOGUES[1]), (64, 32, EPILOGUES[2])):
        for tokens in (1, MOST_STRIP_ROWS, 64, 128):
            assert lone_block(132, tokens, tiles, steps, 4224, epilogue).grid(tiles, 132, tokens) == 128


def test_the_kernel_depends_on_the_number_of_rows() -> None:
    found = [type(lone_block(132, rows, 64, 32, 4224, EPILOGUES[0])) for rows in (MOST_STRIP_ROWS, MOST_STRIP_ROWS + 1)]
    assert found == [StripsVariant, WideVariant]
