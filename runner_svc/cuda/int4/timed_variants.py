"""The variants of products with 4-bit matrices that are timed at start."""

from __future__ import annotations

from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.stream_variant import MOST_ROWS, StreamVariant
from runner_svc.cuda.int4.wide_variant import WideVariant

ADDS = "EPILOGUE_RESIDUAL"
_FEWEST_WIDE_ROWS, _MOST_MIXED_ROWS = 33, 64


def timed(
    blocks: int, multiprocessors: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int, epilogue: str
) -> Int4Variant | StreamVariant | WideVariant:
    """Returns what is timed as `blocks`, 1 or 2 of a multiprocessor, for x of `num_tokens` rows.

    W has `tiles` by `steps` tiles of `tile_bytes`. Streams have one block, and up to 8 rows. From 33 rows on,
    the kernel of many rows, which rounds weights, is timed as one block; up to 64 rows as two blocks too for what
    adds to the residual stream.
    """
    if blocks == 1 and num_tokens <= MOST_ROWS:
        stream = StreamVariant.choose(multiprocessors, tiles, steps, tile_bytes, epilogue)
        if stream.fits:
            return stream
    mixed = blocks == 2 and _FEWEST_WIDE_ROWS <= num_tokens <= _MOST_MIXED_ROWS
    if (blocks == 1 and num_tokens >= _FEWEST_WIDE_ROWS) or (mixed and epilogue == ADDS):
        return WideVariant.choose(multiprocessors, num_tokens, tiles, steps, tile_bytes, epilogue)
    if mixed:
        return Int4Variant.choose(2, num_tokens, tiles, steps, tile_bytes)
    return Int4Variant.timed(blocks, num_tokens, tiles, steps, tile_bytes)
