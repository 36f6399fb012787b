"""How decode and prefill share the multiprocessors of a mixed step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.attention.decode_plan import RANGE_WORDS, ROW_WORDS, DecodePlanner
from runner_svc.attention.mixed_plan import DecodeRows, MixedPlanner, PrefillRows
from runner_svc.attention.prefill_plan import PrefillPlanner

GRID, BATCH = 132, 64


def planner_of(window: int | None = None) -> MixedPlanner:
    decode = DecodePlanner(batch=BATCH, grid=GRID, min_cost=9, units=8, end_cost=8, window=window)
    return MixedPlanner(decode, PrefillPlanner(128, window, GRID), heads=32)


def decode_rows(lengths: list[int]) -> DecodeRows:
    rows = np.arange(len(lengths), dtype=np.int32)
    return DecodeRows(np.array(lengths, np.int32), rows, rows)


def prefill_rows(rows: list[tuple[int, int]]) -> PrefillRows:
    starts, counts = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    return PrefillRows(starts, counts, np.arange(len(rows), dtype=np.int32), np.cumsum(counts, dtype=np.int32) - counts)


@pytest.mark.parametrize("window", [None, 500])
@given(
    lengths=st.lists(st.integers(1, 4000), max_size=BATCH),
    chunks=st.lists(st.tuples(st.integers(0, 3000), st.integers(2, 1024)), max_size=5),
)
def test_both_plans_are_for_as_many_blocks_as_there_are(
    window: int | None, lengths: list[int], chunks: list[tuple[int, int]]
) -> None:
    planner, decode, prefill = planner_of(window), decode_rows(lengths), prefill_rows(chunks)
    words = planner.prefill.max_words(int(prefill.counts.sum()), len(chunks))
    plans = np.full(planner.decode.words, -1, np.int32), np.full(words, -1, np.int32)
    planner.write(decode, prefill, *plans)
    ranges = plans[0][BATCH * ROW_WORDS :].reshape(GRID, RANGE_WORDS)
    working = int(np.count_nonzero(ranges[:, 9] > ranges[:, 8]))
    blocks = planner.decode_blocks(decode, prefill)
    assert blocks % 2 == 0 and blocks <= 0.7 * GRID + 1
    assert working <= blocks and (working > 0) == (len(lengths) > 0)
    assert plans[1][:2].tolist() == [planner.prefill.num_tiles(prefill.counts), GRID - blocks]


def test_who_has_more_work_gets_more_multiprocessors() -> None:
    planner = planner_of()
    chunk = prefill_rows([(0, 1024)])
    shares = [planner.decode_blocks(decode_rows([1000] * rows), chunk) for rows in (1, 8, 32, 64)]
    assert shares == sorted(shares) and shares[0] < shares[-1]
    later = prefill_rows([(3000, 1024)])
    assert planner.decode_blocks(decode_rows([1000] * 32), later) < shares[2]


def test_what_prefill_has_no_pieces_for_is_left_to_decode() -> None:
    # One tile for each of 32 heads, of many keys: more multiprocessors would not help it.
    blocks = planner_of().decode_blocks(decode_rows([1000] * 8), prefill_rows([(9000, 100)]))
    assert blocks == 92
