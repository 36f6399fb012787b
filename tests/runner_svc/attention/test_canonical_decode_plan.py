"""Plans of decode attention in the canonical order, interpreted as in the kernel: each segment is done once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.attention.canonical_gpu.decode_plan import WHOLE, CanonicalDecodePlanner
from runner_svc.attention.canonical_gpu.variants import SEGMENT, SUB_TILE, CanonicalDecodeVariant
from runner_svc.attention.cuda_kernels import AttentionShape
from runner_svc.attention.decode_plan import RANGE_WORDS, ROW_WORDS
from tests.support.gpu_limits import SHARED_MEMORY


def planner_of(batch: int, grid: int, units: int, window: int | None, slots: int) -> CanonicalDecodePlanner:
    return CanonicalDecodePlanner(batch, grid, 1, units, 0, window, slots=slots)


@st.composite
def planners(draw: st.DrawFn) -> CanonicalDecodePlanner:
    return planner_of(
        draw(st.integers(1, 12)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 8)),
        draw(st.none() | st.integers(1, 3000)),
        draw(st.just(10**6) | st.integers(0, 60)),
    )


def plan_of(planner: CanonicalDecodePlanner, lengths: list[int]) -> tuple[np.ndarray, list[list[int]]]:
    """Returns rows and ranges of a plan; table and query rows descend, so that none equals an index by chance."""
    plan = np.full(planner.words, -7, np.int32)
    countdown = np.arange(len(lengths), 0, -1, dtype=np.int32)
    planner.write(np.array(lengths, np.int32), countdown, countdown + 100, plan)
    rows = plan[: planner.batch * ROW_WORDS].reshape(-1, ROW_WORDS)[: len(lengths)]
    return rows, plan[planner.batch * ROW_WORDS :].reshape(-1, RANGE_WORDS).tolist()


def check(planner: CanonicalDecodePlanner, lengths: list[int]) -> None:
    """Walks over the ranges as kernels/canonical_decode.cu does."""
    rows, ranges = plan_of(planner, lengths)
    done: dict[tuple[int, int], list[int]] = defaultdict(list)
    bases: dict[tuple[int, int], set[int]] = defaultdict(set)
    for words in ranges:
        begin, end = words[8:10]
        row = rows[words[6]].tolist() if begin < end else []
        assert not row or words[:ROW_WORDS] == row
        flat = begin
        while flat < end:
            offset = flat - row[0] * planner.units
            unit, index = divmod(offset, row[1])
            last = min(row[1], index + end - flat)
            base = words[10] if flat == begin else words[12] if last < row[1] else WHOLE
            assert (base == WHOLE) == (index == 0 and last == row[1])
            done[row[6], unit] += range(index, last)
            bases[row[6], unit].add(base)
            flat += last - index
            if unit + 1 == planner.units and flat < end:
                row = rows[row[6] + 1].tolist()
    used: list[int] = []
    for index, length in enumerate(lengths):
        first = 0 if planner.window is None else max(0, length - planner.window)
        segments = max(1, -(-length // SEGMENT) - first // SEGMENT)
        assert rows[index, 1:8].tolist()[:6] == [
            segments, length, first, len(lengths) - index, len(lengths) - index + 100, index
        ]  # fmt: skip
        for unit in range(planner.units):
            assert done[index, unit] == list(range(segments))
            (base,) = bases[index, unit]
            used += [] if base == WHOLE else range(base, base + segments)
    assert len(set(used)) == len(used) <= planner.slots
    assert not used or max(used) < planner.slots


@given(planners(), st.data())
def test_each_segment_is_done_once_and_stored_in_its_own_slot(
    planner: CanonicalDecodePlanner, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5000), min_size=1, max_size=planner.batch))
    check(planner, lengths)


def costs(planner: CanonicalDecodePlanner, lengths: list[int]) -> list[int]:
    """Returns the sub-tiles of each range."""
    rows, ranges = plan_of(planner, lengths)
    tiles = []
    for words in ranges:
        own, row = 0, words[6]
        for flat in range(*words[8:10]):
            while flat >= (rows[row, 0] + rows[row, 1]) * planner.units:
                row += 1
            index = (flat - rows[row, 0] * planner.units) % rows[row, 1]
            own += min(4, -(-(rows[row, 2] - index * SEGMENT) // SUB_TILE))
        tiles.append(own)
    return tiles


@pytest.mark.parametrize("lengths", [[704] * 256, [1024] * 64, [8192] * 8, [16000, 300, 5000], [130] * 200])
def test_ranges_cost_about_the_same(lengths: list[int]) -> None:
    """No range has more than its share and half of a segment at each end, rounded."""
    planner = planner_of(len(lengths), 264, 8, None, 10**6)
    own = costs(planner, lengths)
    assert max(own) <= -(-sum(own) // 264) + 5


def test_few_segments_are_spread_over_the_blocks() -> None:
    assert sorted(costs(planner_of(1, 264, 8, None, 10**6), [512]))[-17:] == [0, *[4] * 16]


@pytest.mark.parametrize("arch", list(SHARED_MEMORY))
@pytest.mark.parametrize("positions", [0, 1, 2, 6, 8])
@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_variant_fits_the_shared_memory(head_dim: int, fp8_cache: bool, positions: int, arch: str) -> None:
    shape = AttentionShape("__nv_bfloat16", head_dim, 32, 8, 16, None, fp8_cache)
    variant = CanonicalDecodeVariant.choose(shape, SHARED_MEMORY[arch], positions)
    assert variant.shared_bytes <= SHARED_MEMORY[arch].per_block(variant.blocks)
    assert variant.stages >= 2
    assert variant.units * variant.unit_queries >= 32 * max(positions, 1)
