"""Plans of decode attention, interpreted as in the kernel: each tile is done once, and one block merges."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.attention.decode_plan import RANGE_BEGIN, RANGE_END, RANGE_WORDS, ROW_WORDS, TILE, DecodePlanner
from tests.support.decode_plan_twin import PlannerTwin


@dataclass(frozen=True)
class Segment:
    """One thread block's part of a (row, unit), in tiles of the line."""

    block: int
    slot: int
    first_slot: int
    last_block: int
    begin: int
    end: int


@st.composite
def planners(draw: st.DrawFn) -> DecodePlanner:
    end_cost = draw(st.integers(0, 4) | st.just(27))
    return DecodePlanner(
        batch=draw(st.integers(1, 12)),
        grid=draw(st.integers(1, 40)),
        min_cost=end_cost + draw(st.integers(1, 8)),
        units=draw(st.integers(1, 8)),
        end_cost=end_cost,
        window=draw(st.none() | st.integers(1, 100)),
        whole_limit=draw(st.sampled_from([0.0, 1.5, 50.0])),
    )


def plan_of(planner: DecodePlanner, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and ranges of a plan; table and query rows descend, so that none equals an index by chance."""
    plan = np.full(planner.words, -1, np.int32)
    countdown = np.arange(planner.batch, 0, -1, dtype=np.int32)
    planner.write(np.array(lengths, np.int32), countdown, countdown + 100, plan)
    rows = plan[: planner.batch * ROW_WORDS].reshape(-1, ROW_WORDS)
    return rows, plan[planner.batch * ROW_WORDS :].reshape(-1, RANGE_WORDS)


def segments_of(planner: DecodePlanner, rows: np.ndarray, ranges: np.ndarray) -> dict[tuple[int, int], list[Segment]]:
    """Returns the segments of each (row, unit), as the thread blocks compute them."""
    segments = defaultdict(list)
    for block, words in enumerate(ranges.tolist()):
        begin, end = words[8:10]
        if begin >= end:
            continue
        row, (start, tiles) = words[6], words[:2]
        unit, skipped = divmod(begin - start * planner.units, tiles)
        flat = begin
        while flat < end:
            segment_end = min(end, flat + int(rows[row, 1]) - skipped)
            slot = 2 * block + (flat > begin)
            split = words[10:12] if flat == begin else words[12:14] if segment_end == end else [slot, block]
            segments[row, unit].append(Segment(block, slot, *split, flat, segment_end))
            flat, skipped, unit = segment_end, 0, unit + 1
            if unit == planner.units:
                row, unit = row + 1, 0
    return segments


@given(planners(), st.data())
def test_blocks_share_all_tiles_and_agree_on_the_merging_block(planner: DecodePlanner, data: st.DataObject) -> None:
    longest = data.draw(st.sampled_from([4, 40, 700]))
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=planner.batch, max_size=planner.batch))
    rows, ranges = plan_of(planner, lengths)
    segments = segments_of(planner, rows, ranges)
    assert len(segments) == planner.batch * planner.units
    for (row, unit), parts in segments.items():
        begin = int((rows[row, 0]) * planner.units + unit * rows[row, 1])
        assert [part.begin for part in parts] == [begin] + [part.end for part in parts[:-1]]
        assert parts[-1].end == begin + rows[row, 1]
        assert [part.block for part in parts] == list(range(parts[0].block, parts[-1].block + 1))
        # The first slot of an unsplit (row, unit) is not used.
        if len(parts) > 1:
            assert {part.first_slot for part in parts} == {parts[0].slot}
        assert {part.first_slot // 2 for part in parts} == {parts[0].block}
        assert {part.last_block for part in parts} == {parts[-1].block}
        assert [part.slot for part in parts[1:]] == [2 * part.block for part in parts[1:]]


@given(planners(), st.data())
def test_plans_equal_those_of_the_reference(planner: DecodePlanner, data: st.DataObject) -> None:
    planner = replace(planner, whole_limit=0.0)
    num_rows = data.draw(st.integers(1, planner.batch))
    longest = data.draw(st.sampled_from([4, 40, 700, 100_000]))
    lengths = np.array(data.draw(st.lists(st.integers(0, longest), min_size=num_rows, max_size=num_rows)), np.int32)
    twin = PlannerTwin(planner.batch, planner.grid, planner.min_cost, planner.units, planner.end_cost, planner.window)
    tables, queries = np.arange(7, 7 + num_rows, dtype=np.int32), np.arange(num_rows, 0, -1, dtype=np.int32)
    plans = np.full((2, planner.words), -1, np.int32)
    blocks = data.draw(st.none() | st.integers(1, planner.grid))
    planner.write(lengths, tables, queries, plans[0], blocks)
    twin.write(lengths, tables, queries, plans[1], blocks)
    np.testing.assert_array_equal(plans[0], plans[1])


@given(planners(), st.data())
def test_rows_cover_what_their_queries_see(planner: DecodePlanner, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 700), min_size=planner.batch, max_size=planner.batch))
    rows, _ = plan_of(planner, lengths)
    for row, length in zip(rows.tolist(), lengths, strict=True):
        first = 0 if planner.window is None else max(0, length - planner.window)
        assert row[2:4] == [length, first]
        covered = range(first // TILE * TILE, first // TILE * TILE + row[1] * TILE)
        assert covered.stop >= length > covered.stop - TILE or row[1] == 1


def test_work_is_shared_evenly_whatever_the_lengths() -> None:
    planner = DecodePlanner(batch=3, grid=10, min_cost=1, units=2, end_cost=0, window=None)
    _, ranges = plan_of(planner, [16 * 1000, 16, 16 * 499])
    assert (ranges[:, RANGE_END] - ranges[:, RANGE_BEGIN] == 300).all()


@pytest.mark.parametrize(("rows", "longest"), [(1, 8), (8, 11)])
def test_few_rows_are_cut_where_no_block_merges_twice(rows: int, longest: int) -> None:
    """44 tiles for each of 4 units on 132 blocks: equal shares of 8 or 11 tiles would end within some (row, unit)s."""
    planner = DecodePlanner(batch=rows, grid=132, min_cost=8, units=4, end_cost=0, window=None)
    plan_rows, ranges = plan_of(planner, [704] * rows)
    parts = segments_of(planner, plan_rows, ranges).values()
    blocks = [part.block for each in parts for part in each]
    assert len(blocks) == len(set(blocks))
    assert max(part.end - part.begin for each in parts for part in each) == longest


@pytest.mark.parametrize(
    ("rows", "spread", "whole"), [(64, 40, True), (64, 400, False), (67, 0, False), (128, 0, True)]
)
def test_ranges_are_whole_where_that_costs_little(rows: int, spread: int, whole: bool) -> None:
    """Of 264 blocks, 256 take 2 units each of 64 rows; those of 67 rows would take 3 each of 179 blocks."""
    planner = DecodePlanner(batch=rows, grid=264, min_cost=6, units=8, end_cost=5, window=None, whole_limit=1.1)
    lengths = [600 + row * spread // rows for row in range(rows)]
    plan_rows, ranges = plan_of(planner, lengths)
    parts = segments_of(planner, plan_rows, ranges)
    assert len(parts) == 8 * rows
    assert all(len(each) == 1 for each in parts.values()) == whole
    if whole:
        sizes = ranges[:, RANGE_END] - ranges[:, RANGE_BEGIN]
        assert (sizes > 0).sum() == 256


def test_blocks_beyond_the_requested_number_have_no_work() -> None:
    planner = DecodePlanner(batch=2, grid=10, min_cost=1, units=2, end_cost=3, window=None)
    plan = np.full(planner.words, -1, np.int32)
    rows = np.arange(2, dtype=np.int32)
    planner.write(np.array([16 * 70, 16 * 30], np.int32), rows, rows, plan, blocks=4)
    ranges = plan[2 * ROW_WORDS :].reshape(-1, RANGE_WORDS)
    sizes = ranges[:, RANGE_END] - ranges[:, RANGE_BEGIN]
    assert (sizes[:4] > 40).all() and sizes.sum() == 200 and not sizes[4:].any()
    assert planner.cost(np.array([16 * 70, 16 * 30], np.int32)) == 2 * (70 + 30 + 2 * 3)


def test_much_work_for_few_blocks_of_a_large_grid() -> None:
    planner = DecodePlanner(batch=64, grid=132, min_cost=28, units=8, end_cost=27, window=None)
    rows = np.arange(64, dtype=np.int32)
    plan = np.full(planner.words, -1, np.int32)
    planner.write(np.full(64, 1 << 20, np.int32), rows, rows, plan, blocks=2)
    ranges = plan[64 * ROW_WORDS :].reshape(-1, RANGE_WORDS)
    assert (ranges[:2, 9] - ranges[:2, 8]).tolist() == [64 * 65536 * 4] * 2
    assert (ranges[2:, 8] == ranges[2:, 9]).all()
