"""Plans of prefill attention: each query is in one tile, the longest tiles come first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.attention.prefill_plan import HEADER_WORDS, KEYS, TILE_WORDS, PrefillPlanner

ROWS = st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 500)), max_size=8)


def tiles_of(planner: PrefillPlanner, rows: list[tuple[int, int]]) -> list[list[int]]:
    starts, counts = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    queries = (np.cumsum(counts) - counts).astype(np.int32)
    plan = np.full(planner.max_words(int(counts.sum()), len(rows)), -1, np.int32)
    used = planner.write(starts, counts, np.arange(len(rows), dtype=np.int32), queries, plan)
    tiles = plan[HEADER_WORDS:used].reshape(-1, TILE_WORDS)
    assert plan[:2].tolist() == [len(tiles), planner.grid]
    return tiles.tolist()


@pytest.mark.parametrize("window", [None, 1, 100])
@given(rows=ROWS)
def test_every_query_is_in_one_tile(window: int | None, rows: list[tuple[int, int]]) -> None:
    planner = PrefillPlanner(64, window, 132)
    seen = {}
    for query, size, position, first, length, row, *_ in tiles_of(planner, rows):
        start, count = rows[row]
        assert 1 <= size <= 64 and length == start + count
        assert first == (0 if window is None else max(0, position - window + 1))
        seen.update({query + i: (row, position + i) for i in range(size)})
    expected = [(row, start + i) for row, (start, count) in enumerate(rows) for i in range(count)]
    assert seen == dict(enumerate(expected))


@given(rows=ROWS)
def test_the_longest_tiles_come_first(rows: list[tuple[int, int]]) -> None:
    lengths = [
        -(-(position + size) // KEYS) for _, size, position, *_ in tiles_of(PrefillPlanner(128, None, 132), rows)
    ]
    assert lengths == sorted(lengths, reverse=True)
