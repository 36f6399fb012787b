"""Buckets: which sizes there are, which one a batch gets, and that slow ones are left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from runner_svc.cuda_graphs import LARGEST_BUCKET, StepGraphs, bucket_sizes, token_sizes


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 9, 64, 100, 256, 300, 512, 4096])
def test_sizes_rise_to_the_most_rows_and_waste_little(max_rows: int) -> None:
    sizes = bucket_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_rows, LARGEST_BUCKET)
    assert all(above - below <= max(8, below // 16) for below, above in itertools.pairwise(sizes) if below > 2)


@pytest.mark.parametrize("max_tokens", [1, 40, 64, 500, 2048, 8192])
def test_token_sizes_rise_to_the_most_positions(max_tokens: int) -> None:
    sizes = token_sizes(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_tokens
    assert all(above - below <= max(64, below // 4) for below, above in itertools.pairwise(sizes))


def test_mixed_steps_are_captured_while_that_is_worth_it() -> None:
    graphs, ran = StepGraphs([64, 128, 192, 256]), []  # type: ignore[var-annotated]

    def is_worth_it(launch: Callable[[], None], replay: Callable[[], None]) -> bool:
        replay()
        return ran[-1] < 192

    graphs.capture_small(ran.append, lambda launch: launch, is_worth_it, lambda what, share: None)
    assert graphs.sizes == [64, 128]
    assert [graphs.bucket(size) for size in (3, 64, 65, 129)] == [64, 64, 128, None]
    graphs.replay(128)
    assert ran[-1] == 128


def captured(sizes: list[int], times: dict[int, float] | None = None) -> tuple[StepGraphs, list[int]]:
    """Graphs that record which size ran, and take as long as `times` says."""
    ran: list[int] = []

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function

    def seconds(replay: Callable[[], None]) -> float:
        return times[ran[-1]] if times else 0.0

    graphs = StepGraphs(sizes)
    graphs.capture(lambda size: [lambda: ran.append(size)], capture, seconds, lambda what, share: None)
    return graphs, ran


def test_the_largest_is_captured_first_and_a_batch_gets_the_next_size() -> None:
    graphs, ran = captured([1, 2, 4, 8])
    assert ran == [8, 4, 2, 1]
    assert [graphs.bucket(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    graphs.replay(4)
    assert ran[-1] == 4


def test_the_fastest_way_to_launch_a_size_is_kept() -> None:
    ran: list[tuple[str, int]] = []
    graphs = StepGraphs([1, 2])
    times = {("small", 1): 1.0, ("large", 1): 2.0, ("small", 2): 4.0, ("large", 2): 3.0}

    def seconds(replay: Callable[[], None]) -> float:
        replay()
        return times[ran[-1]]

    graphs.capture(
        lambda size: [lambda name=name: ran.append((name, size)) for name in ("small", "large")],  # type: ignore[misc]
        lambda launch: launch,
        seconds,
        lambda what, share: None,
    )
    for size in (1, 2):
        graphs.replay(size)
    assert ran[-2:] == [("small", 1), ("large", 2)]


def test_sizes_slower_than_a_larger_one_are_left_out() -> None:
    graphs, _ = captured([1, 2, 4, 8], {1: 5.0, 2: 1.0, 4: 3.0, 8: 2.0})
    graphs.drop_slow()
    assert graphs.sizes == [2, 8]
    assert [graphs.bucket(rows) for rows in (1, 3, 8)] == [2, 8, 8]
