"""Variants of products of up to eight rows with 4-bit matrices: sizes that fit, and where they are timed."""

from __future__ import annotations

import pytest

from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.stream_variant import MOST_ROWS, StreamVariant
from runner_svc.cuda.int4.timed_variants import timed

BLOCK_BYTES = 227 << 10
LARGEST_TILE = 4096 + 4 * 64 * 5
"""Bytes of a tile with groups of 32, scales in float32 and zeros."""
MATRICES = [(64, 32), (448, 32), (64, 112), (96, 32), (9, 5), (1, 1), (1792, 64), (896, 128)]


@pytest.mark.parametrize("tile_bytes", [4224, LARGEST_TILE])
@pytest.mark.parametrize("epilogue", ["EPILOGUE_STORE", "EPILOGUE_GATED", "EPILOGUE_RESIDUAL"])
@pytest.mark.parametrize(("tiles", "steps"), MATRICES)
def test_blocks_fit(tiles: int, steps: int, epilogue: str, tile_bytes: int) -> None:
    found = StreamVariant.choose(132, tiles, steps, tile_bytes, epilogue)
    assert found.fits
    assert found.shared_bytes <= BLOCK_BYTES
    assert int(found.defines["STAGES"]) >= 2
    assert found.steps * int(found.defines["WARPS"]) >= steps
    assert found.units == 1 or found.resident_steps == found.steps
    assert found.grid(tiles, 132, 8) * found.units * found.strips >= tiles * 4
    assert (found.grid(tiles, 132, 8) - 1) * found.units * found.strips < tiles * 4
    assert epilogue != "EPILOGUE_GATED" or found.strips == 2
    assert epilogue != "EPILOGUE_RESIDUAL" or found.outputs >= 32  # as the sums of squares have room


@pytest.mark.parametrize(
    ("tiles", "steps", "epilogue"),
    [(96, 32, "STORE"), (448, 32, "GATED"), (64, 112, "RESIDUAL"), (64, 32, "RESIDUAL")],
)
def test_matrices_of_8b_have_a_block_on_almost_each_multiprocessor(tiles: int, steps: int, epilogue: str) -> None:
    assert StreamVariant.choose(132, tiles, steps, 4224, f"EPILOGUE_{epilogue}").grid(tiles, 132, 8) == 128


@pytest.mark.parametrize(("tiles", "steps"), MATRICES)
def test_streams_are_timed_beside_tiles(tiles: int, steps: int) -> None:
    shape = (tiles, steps, 4224, "EPILOGUE_GATED")
    for rows in (1, MOST_ROWS):
        assert timed(1, 132, rows, *shape) == StreamVariant.choose(132, *shape)
        assert timed(2, 132, rows, *shape) == Int4Variant.timed(2, rows, *shape)
    for blocks in (1, 2):
        assert timed(blocks, 132, MOST_ROWS + 1, *shape) == Int4Variant.timed(blocks, MOST_ROWS + 1, *shape)
