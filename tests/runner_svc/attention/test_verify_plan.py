"""Plans of verify rows: whatever the counters within the bounds, every key that a query sees is in a tile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.attention.decode_plan import RANGE_BEGIN, RANGE_END, RANGE_WORDS, ROW_WORDS, TILE, DecodePlanner
from runner_svc.attention.mixed_plan import MixedPlanner
from runner_svc.attention.prefill_plan import PrefillPlanner
from runner_svc.attention.verify_plan import VerifyPlanner
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows, VerifyRows
from tests.support.decode_plan_twin import PlannerTwin

GRID, UNITS = 20, 3


def line_of(rows: int, window: int | None, end_cost: int = 0) -> DecodePlanner:
    return DecodePlanner(rows, GRID, min_cost=end_cost + 4, units=UNITS, end_cost=end_cost, window=window)


def verify_rows(lowers: list[int], uppers: list[int]) -> VerifyRows:
    """Returns rows whose table and query rows descend, so that none equals an index by chance."""
    countdown = np.arange(len(lowers), 0, -1, dtype=np.int32)
    return VerifyRows(np.array(lowers, np.int32), np.array(uppers, np.int32), countdown, countdown + 100)


@given(
    bounds=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), min_size=1, max_size=6),
    positions=st.integers(1, 8),
    window=st.none() | st.integers(1, 70),
    end_cost=st.sampled_from([0, 5]),
)
def test_a_plan_covers_every_counter_within_its_bounds(
    bounds: list[tuple[int, int]], positions: int, window: int | None, end_cost: int
) -> None:
    capacity = 320
    lowers, uppers = [lower for lower, _ in bounds], [min(lower + spread, capacity) for lower, spread in bounds]
    line, rows = line_of(len(bounds), window, end_cost), verify_rows(lowers, uppers)
    plans = np.full((2, line.words), -1, np.int32)
    VerifyPlanner(line, positions, capacity).write(rows, plans[0])
    row_words = plans[0, : ROW_WORDS * len(bounds)].reshape(-1, ROW_WORDS).tolist()
    for (_, tiles, length, first, *_), lower, upper in zip(row_words, lowers, uppers, strict=True):
        covered = range(first // TILE * TILE, min(first // TILE * TILE + tiles * TILE, length))
        for known in range(lower, upper + 1):
            for end in range(known, min(known + positions, capacity + 1)):
                seen = range(0 if window is None else max(0, end - window), end)
                assert not seen or (covered.start <= seen.start and seen.stop <= covered.stop)
    ranges = plans[0, ROW_WORDS * len(bounds) :].reshape(GRID, RANGE_WORDS)
    assert (ranges[:, RANGE_END] - ranges[:, RANGE_BEGIN]).sum() == UNITS * sum(row[1] for row in row_words)
    twin = PlannerTwin(len(bounds), GRID, line.min_cost, UNITS, end_cost, window)
    lengths = np.minimum(rows.uppers + positions - 1, capacity)
    firsts = None if window is None else np.maximum(rows.lowers - window, 0)
    twin.write(lengths, rows.table_rows, rows.query_rows, plans[1], firsts=firsts)
    np.testing.assert_array_equal(plans[0], plans[1])


@pytest.mark.parametrize("window", [None, 40])
def test_the_plan_of_known_counters_and_one_position_is_that_of_decode(window: int | None) -> None:
    lengths = [700, 1, 33, 96]
    line, rows = line_of(4, window), verify_rows(lengths, lengths)
    plans = np.full((2, line.words), -1, np.int32)
    VerifyPlanner(line, 1, 1000).write(rows, plans[0])
    line.write(rows.uppers, rows.table_rows, rows.query_rows, plans[1])
    np.testing.assert_array_equal(plans[0], plans[1])


def test_bounds_in_the_wrong_order_are_refused() -> None:
    line = line_of(2, None)
    with pytest.raises(ValueError, match="lower bound"):
        VerifyPlanner(line, 2, 100).write(verify_rows([5, 7], [5, 6]), np.zeros(line.words, np.int32))


@pytest.mark.parametrize("window", [None, 500])
def test_verify_rows_of_one_position_share_a_mixed_step(window: int | None) -> None:
    line = DecodePlanner(batch=8, grid=132, min_cost=28, units=8, end_cost=27, window=window)
    rows = verify_rows([900] * 8, [940] * 8)
    covered = VerifyPlanner(line, 1, 4096).covered(rows)
    decode = DecodeRows(rows.uppers, rows.table_rows, rows.query_rows)
    planner = MixedPlanner(line, PrefillPlanner(128, window, 132), 32)
    chunk = PrefillRows(*(np.array([value], np.int32) for value in (0, 1024, 9, 8)))
    plans = np.zeros((2, line.words), np.int32), np.zeros((2, planner.prefill.max_words(1024, 1)), np.int32)
    for index, each in enumerate((covered, decode)):
        planner.write(each, chunk, plans[0][index], plans[1][index])
    shares = [line.cost(each.lengths, each.firsts) for each in (covered, decode)]
    assert shares[0] >= shares[1] and shares[0] - shares[1] <= 8 * 8 * 4  # 40 more positions, aligned to tiles
    assert 0 < plans[1][0][1] < 132
