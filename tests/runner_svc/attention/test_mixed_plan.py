"""Tests how decode and prefill share the multiprocessors in a mixed step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.attention.decode_plan import RANGE_BEGIN, RANGE_END, RANGE_WORDS, ROW_WORDS, DecodePlanner
from runner_svc.attention.mixed_plan import MixedPlanner
from runner_svc.attention.prefill_plan import PrefillPlanner
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows

GRID, BATCH = 132, 64


def planner_of(window: int | None = None, fp8_cache: bool = False) -> MixedPlanner:
    decode = DecodePlanner(batch=BATCH, grid=GRID, min_cost=28, units=8, end_cost=27, window=window)
    return MixedPlanner(decode, PrefillPlanner(128, window, GRID), 32, fp8_cache)


def shared(planner: MixedPlanner, lengths: list[int], chunks: list[tuple[int, int]]) -> tuple[int, int]:
    """Returns the number of blocks with decode work, and of blocks that prefill is dealt to."""
    rows = np.arange(len(lengths), dtype=np.int32)
    starts, counts = (np.array([chunk[i] for chunk in chunks], np.int32) for i in (0, 1))
    queries = np.cumsum(counts, dtype=np.int32) - counts
    plans = (
        np.full(planner.decode.words, -1, np.int32),
        np.full(planner.prefill.max_words(int(counts.sum()), len(chunks)), -1, np.int32),
    )
    planner.write(
        DecodeRows(np.array(lengths, np.int32), rows, rows),
        PrefillRows(starts, counts, np.arange(len(chunks), dtype=np.int32), queries),
        *plans,
    )
    assert plans[1][0] == (-(-counts // 128)).sum()
    ranges = plans[0][BATCH * ROW_WORDS :].reshape(GRID, RANGE_WORDS)
    return int(np.count_nonzero(ranges[:, RANGE_END] > ranges[:, RANGE_BEGIN])), int(plans[1][1])


@pytest.mark.parametrize("window", [None, 500])
@given(
    lengths=st.lists(st.integers(1, 4000), max_size=BATCH),
    chunks=st.lists(st.tuples(st.integers(0, 3000), st.integers(2, 1024)), max_size=5),
)
def test_both_have_blocks_of_their_own_or_all_in_turn(
    window: int | None, lengths: list[int], chunks: list[tuple[int, int]]
) -> None:
    decoding, dealt = shared(planner_of(window), lengths, chunks)
    assert (decoding > 0) == (len(lengths) > 0)
    assert dealt == GRID or (dealt % 2 == 0 and dealt >= GRID // 4 and decoding <= GRID - dealt)


def test_more_work_gets_more_multiprocessors() -> None:
    planner, short, long = planner_of(), [(0, 1024)], [(1024, 1024)]
    left = [shared(planner, [1000] * rows, short)[1] for rows in (4, 8, 16, 64)]
    assert left == sorted(left, reverse=True) and GRID > left[0] > left[-1]
    assert shared(planner, [1000] * 64, long)[1] > left[-1]


def test_many_rows_of_an_fp8_cache_leave_prefill_more_multiprocessors() -> None:
    """An FP8 cache has half the bytes.

    Decode of 128 rows at position 1,000 beside 896 positions after 1,000: 110 us with 80 multiprocessors, 153 with 96.
    """
    planners = [planner_of(fp8_cache=fp8_cache) for fp8_cache in (False, True)]
    cost, key_tiles = planners[0].decode.cost(np.full(128, 1000, np.int32)), np.arange(15, 8, -1, dtype=np.int32)
    sixteen_bit, fp8 = (planner.decode_blocks(cost, key_tiles) for planner in planners)
    assert sixteen_bit > 90 > fp8 > 70


def test_in_turn_if_one_multiprocessor_less_costs_prefill_a_round() -> None:
    # 264 pieces of 33 key tiles each, two per multiprocessor.
    planner = MixedPlanner(planner_of().decode, PrefillPlanner(128, None, GRID), heads=33)
    assert shared(planner, [500] * 4, [(32 * 128 + 128 * tile, 128) for tile in [0] * 8])[1] == GRID


@pytest.mark.parametrize("chunks", [[], [(0, 1024)], [(32 * 128, 128)] * 8])
def test_an_odd_number_of_multiprocessors_loses_no_work(chunks: list[tuple[int, int]]) -> None:
    """Decode's blocks come in pairs: it has one multiprocessor fewer than prefill, even when it should have all."""
    decode = DecodePlanner(batch=2, grid=10, min_cost=4, units=2, end_cost=3, window=None)
    planner = MixedPlanner(decode, PrefillPlanner(128, None, 11), heads=3)
    rows, parts = np.arange(2, dtype=np.int32), np.array(chunks, np.int32).reshape(-1, 2)
    plans = np.full(decode.words, -1, np.int32), np.full(planner.prefill.max_words(2048, 8), -1, np.int32)
    prefill = PrefillRows(parts[:, 0], parts[:, 1], np.arange(len(parts)), np.cumsum(parts[:, 1]))
    planner.write(DecodeRows(np.array([16 * 70, 16 * 30], np.int32), rows, rows), prefill, *plans)
    ranges = plans[0][2 * ROW_WORDS :].reshape(10, RANGE_WORDS)
    assert (ranges[:, RANGE_END] - ranges[:, RANGE_BEGIN]).sum() == 2 * (70 + 30)


def test_the_first_and_the_last_block_determine_when_prefill_is_done() -> None:
    rng, planner, ratios = np.random.default_rng(0), planner_of(), []
    for _ in range(100):
        key_tiles = np.sort(rng.integers(1, 40, rng.integers(1, 30)))[::-1].astype(np.int32)
        cost = int(rng.integers(100, 40_000))
        times = {blocks: end_of_both(planner, cost, key_tiles, blocks) for blocks in (*range(2, 99, 2), GRID)}
        ratios.append(times[planner.decode_blocks(cost, key_tiles)] / min(times.values()))
    assert np.mean(ratios) < 1.02 and max(ratios) < 1.3


def end_of_both(planner: MixedPlanner, cost: int, key_tiles: np.ndarray, blocks: int) -> float:
    """Returns when the later of the two is done, in tiles of decode, computed from all blocks."""
    pieces = np.repeat(key_tiles * 17.5 + 9, planner.heads)
    workers = GRID - blocks if blocks < GRID else GRID
    loads = np.zeros(workers)
    for begin in range(0, len(pieces), workers):
        dealt = np.zeros(workers)
        dealt[: len(pieces[begin : begin + workers])] = pieces[begin : begin + workers]
        loads += dealt if begin // workers % 2 == 0 else dealt[::-1]
    decode = cost / blocks * (1 + (blocks / (0.43 * GRID)) ** 4) ** 0.25
    return decode + loads.max() + 50 if blocks == GRID else max(decode, 1.1 * loads.max())
