"""Selects the kernel of a product of up to 128 rows, of those that have one block on each multiprocessor."""

from __future__ import annotations

from runner_svc.cuda.int4.few_rows import Variant
from runner_svc.cuda.int4.strips_variant import StripsVariant
from runner_svc.cuda.int4.wide_variant import WideVariant

MOST_STRIP_ROWS = 16
"""With more rows, weights are converted for all of them at once, which rounds code times scale once."""


def lone_block(
    multiprocessors: int, num_tokens: int, tiles: int, steps: int, tile_bytes: int, epilogue: str
) -> Variant:
    """Returns the variant for x of `num_tokens` rows and W of `tiles` by `steps` tiles."""
    sizes = (multiprocessors, num_tokens, tiles, steps, tile_bytes, epilogue)
    strips = StripsVariant.choose(*sizes) if num_tokens <= MOST_STRIP_ROWS else None
    return strips or WideVariant.choose(*sizes)
