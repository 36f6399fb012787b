"""Buckets: their sizes, the bucket of a batch, and that slow ones are dropped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from runner_svc.gpu.graphs import LARGEST_BUCKET, StepGraphs, Variant, bucket_sizes, token_sizes


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


def test_mixed_steps_are_captured_while_it_is_worth_it() -> None:
    graphs, ran = StepGraphs([64, 128, 192, 256]), []  # type: ignore[var-annotated]

    def is_worth_it(launch: Callable[[], None], replay: Callable[[], None]) -> bool:
        replay()
        return ran[-1] < 192

    graphs.capture_small(ran.append, lambda launch: launch, is_worth_it, lambda what, share: None)
    assert graphs.sizes == [64, 128]
    assert [graphs.bucket(size) for size in (3, 64, 65, 129)] == [64, 64, 128, None]
    graphs.replay(128)
    assert ran[-1] == 128


class Timed:
    """Graphs whose replays take the `times` of the variant, size and prepared rows."""

    def __init__(self, sizes: list[int], times: dict[tuple[str, int, int], float], variants: tuple[str, ...]) -> None:
        self.times = times
        self.ran: list[tuple[str, int]] = []
        self._prepared = (0, 0)
        self._variants = variants
        self.graphs = StepGraphs(sizes)
        self.graphs.capture(self.variants, self.capture, self.prepare, self.seconds, lambda what, share: None)

    def variants(self, size: int) -> list[Variant]:
        return [Variant(name, partial(self.ran.append, (name, size))) for name in self._variants]

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        return launch

    def prepare(self, size: int, rows: int) -> None:
        self._prepared = size, rows

    def seconds(self, replay: Callable[[], None]) -> float:
        replay()
        name, size = self.ran[-1]
        assert self._prepared[0] == size
        return self.times[name, *self._prepared]


def test_the_largest_is_captured_first_and_a_batch_gets_the_next_size() -> None:
    timed = Timed([1, 2, 4, 8], {("only", size, size): 1.0 for size in (1, 2, 4, 8)}, ("only",))
    captured = [size for _, size in timed.ran]
    assert captured == sorted(captured, reverse=True)
    graphs = timed.graphs
    assert [graphs.bucket(rows) for rows in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]
    graphs.replay(4)
    assert timed.ran[-1] == ("only", 4)


def test_the_fastest_way_to_launch_a_size_is_kept() -> None:
    times = {("a", 1, 1): 1.0, ("b", 1, 1): 2.0, ("a", 2, 2): 4.0, ("b", 2, 2): 3.0}
    timed = Timed([1, 2], times, ("a", "b"))
    graphs = timed.graphs
    assert (graphs.variant(1), graphs.variant(2)) == ("a", "b")
    assert graphs.seconds == {1: {"a": 1.0, "b": 2.0}, 2: {"a": 4.0, "b": 3.0}}
    for size in (1, 2):
        graphs.replay(size)
    assert timed.ran[-2:] == [("a", 1), ("b", 2)]


def test_ways_that_are_close_are_timed_again() -> None:
    timed = Timed([8], {("a", 8, 8): 1.0, ("b", 8, 8): 1.01, ("c", 8, 8): 1.2}, ("a", "b", "c"))
    assert [name for name, _ in timed.ran] == ["a", "b", "c", "a", "b", "c", "a", "b"]  # captured, timed, again


def test_sizes_slower_than_a_larger_one_are_dropped() -> None:
    full = {1: 5.0, 2: 1.0, 4: 3.0, 8: 4.0}
    # A graph of 8 rows takes less than its 4.0 if half of them are padding.
    padded = {(8, 4): 2.9, (8, 2): 2.8, (2, 1): 0.9}
    times = {("only", size, size): taken for size, taken in full.items()}
    times |= {("only", *sizes): taken for sizes, taken in padded.items()}
    timed = Timed([1, 2, 4, 8], times, ("only",))
    timed.graphs.drop_slow(timed.prepare, timed.seconds)
    assert timed.graphs.sizes == [2, 8]
    assert [timed.graphs.bucket(rows) for rows in (1, 3, 8)] == [2, 8, 8]
