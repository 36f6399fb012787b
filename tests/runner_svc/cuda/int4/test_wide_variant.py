"""Variants of products of many rows with 4-bit matrices: sizes that fit."""

from __future__ import annotations

import pytest

from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.timed_variants import timed
from runner_svc.cuda.int4.wide_variant import WideVariant

BLOCK_BYTES = 227 << 10
LARGEST_TILE = 4096 + 4 * 64 * 5
"""Bytes of a tile with groups of 32, scales in float32 and zeros."""
MATRICES = [(64, 32), (448, 32), (64, 112), (96, 32), (9, 5), (1, 1), (1792, 64)]
MOST_GROUPS = {64: 4, 128: 3, 192: 2, 256: 2}
"""Warpgroups that have enough registers, by rows of x."""


@pytest.mark.parametrize("epilogue", ["EPILOGUE_STORE", "EPILOGUE_GATED", "EPILOGUE_RESIDUAL"])
@pytest.mark.parametrize(("tiles", "steps"), MATRICES)
def test_blocks_fit(tiles: int, steps: int, epilogue: str) -> None:
    for tokens, tile_bytes in ((17, 4224), (64, LARGEST_TILE), (65, 4224), (128, LARGEST_TILE), (300, 4224)):
        found = WideVariant.choose(132, tokens, tiles, steps, tile_bytes, epilogue)
        inputs, codes = (int(found.defines[f"{ring}_STAGES"]) for ring in ("INPUT", "CODE"))
        assert inputs >= 4
        assert codes >= 2
        assert found.shared_bytes <= BLOCK_BYTES
        assert (
            found.split > 1
            or found.shares
            or found.sum_bytes <= found.shared_bytes - found.tokens * 4 - (inputs + codes) * 16
        )
        assert found.groups <= MOST_GROUPS[found.tokens]
        assert 1 <= found.split <= steps
        passes = -(-tokens // found.tokens)
        blocks = -(-tiles // found.groups) * found.split * passes
        assert found.grid(tiles, 132, tokens) == (132 if found.shares else blocks)
        assert not found.shares or (found.split == 1 and blocks * steps >= 8 * 132)
        assert found.groups * 64 % found.outputs == 0


@pytest.mark.parametrize(("tiles", "steps"), MATRICES)
def test_matrices_are_divided_in_the_same_way_for_few_for_some_and_for_many_rows(tiles: int, steps: int) -> None:
    for numbers in (range(1, 65), range(65, 129), range(129, 513)):
        found = [WideVariant.choose(132, tokens, tiles, steps, 4224, "EPILOGUE_STORE") for tokens in numbers]
        assert len({(one.split, one.groups) for one in found}) == 1


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize(("tiles", "steps", "epilogue"), [(96, 32, "STORE"), (448, 32, "GATED"), (64, 112, "STORE")])
def test_matrices_of_8b_keep_most_multiprocessors_busy(tiles: int, steps: int, epilogue: str, tokens: int) -> None:
    blocks = WideVariant.choose(132, tokens, tiles, steps, 4224, f"EPILOGUE_{epilogue}").grid(tiles, 132, tokens)
    rounds = -(-blocks // 132)
    assert blocks >= 0.72 * rounds * 132


@pytest.mark.parametrize("epilogue", ["EPILOGUE_STORE", "EPILOGUE_GATED", "EPILOGUE_RESIDUAL"])
@pytest.mark.parametrize(("tiles", "steps"), MATRICES)
def test_from_33_rows_on_they_are_timed_beside_tiles(tiles: int, steps: int, epilogue: str) -> None:
    shape = (tiles, steps, 4224, epilogue)
    for rows in (33, 64, 128):
        wide = WideVariant.choose(132, rows, *shape)
        assert timed(1, 132, rows, *shape) == wide
        mixed = rows <= 64 and epilogue == "EPILOGUE_RESIDUAL"
        assert (timed(2, 132, rows, *shape) == wide) == mixed
        assert isinstance(timed(2, 132, rows, *shape), WideVariant if mixed else Int4Variant)
    assert isinstance(timed(1, 132, 32, *shape), Int4Variant)
