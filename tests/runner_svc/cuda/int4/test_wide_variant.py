"""Variants of products of many rows with 4-bit matrices: sizes that fit."""

from __future__ import annotations

import pytest

from runner_svc.cuda.int4.wide_variant import WideVariant

BLOCK_BYTES = 227 << 10
LARGEST_TILE = 4096 + 4 * 64 * 5
"""Bytes of a tile with groups of 32, scales in float32 and zeros."""
MATRICES = [(64, 32), (448, 32), (64, 112), (96, 32), (9, 5), (1, 1), (1792, 64)]


@pytest.mark.parametrize("epilogue", ["EPILOGUE_STORE", "EPILOGUE_GATED", "EPILOGUE_RESIDUAL"])
@pytest.mark.parametrize(("tiles", "steps"), MATRICES)
def test_blocks_fit(tiles: int, steps: int, epilogue: str) -> None:
    for tokens, tile_bytes in ((17, 4224), (64, LARGEST_TILE), (65, 4224), (128, LARGEST_TILE), (300, 4224)):
        found = WideVariant.choose(132, tokens, tiles, steps, tile_bytes, epilogue)
        inputs, numbers, codes = (int(found.defines[f"{ring}_STAGES"]) for ring in ("INPUT", "NUMBER", "CODE"))
        assert min(inputs, numbers, codes) >= 2
        assert found.shared_bytes <= BLOCK_BYTES
        assert found.sum_bytes <= found.shared_bytes - found.tokens * 4 - (inputs + numbers + codes) * 16
        assert found.threads in (384, 512)
        assert found.split <= steps
        passes = -(-tokens // found.tokens)
        assert found.grid(tiles, 132, tokens) == -(-tiles * 4 // found.strips) * found.split * passes
        assert epilogue != "EPILOGUE_GATED" or found.strips % 2 == 0
        assert epilogue != "EPILOGUE_RESIDUAL" or 32 % (found.outputs // 4) == 0


@pytest.mark.parametrize(
    ("tiles", "steps", "epilogue", "blocks"),
    [(96, 32, "STORE", 128), (448, 32, "GATED", 128), (64, 112, "STORE", 116), (64, 32, "RESIDUAL", 128)],
)
def test_matrices_of_8b_have_a_block_on_almost_each_multiprocessor(
    tiles: int, steps: int, epilogue: str, blocks: int
) -> None:
    assert WideVariant.choose(132, 128, tiles, steps, 4224, f"EPILOGUE_{epilogue}").grid(tiles, 132, 128) == blocks
