"""Histograms and the measurements they count."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.metrics.histogram import ITL_BUCKETS_S, Histogram
from scheduler_svc.metrics.measurements import BATCH
from scheduler_svc.model.sequence import FinishReason
from tests.support.in_process import Stack


def test_bounds_are_inclusive_and_nothing_is_lost() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.add(np.array([0.5, 1.0, 1.5, 2.0, 9.0]))
    histogram.add(np.array([]))
    state = histogram.state()
    assert state.counts == (2, 2, 1) and state.total == 14.0
    histogram.add(np.array([1.0]))
    assert state.counts == (2, 2, 1), "a state taken earlier does not move"


@pytest.mark.parametrize("seed", range(3))
def test_many_values_at_once_are_counted_as_one_by_one(seed: int) -> None:
    values = np.random.default_rng(seed).gamma(2.0, 0.02, 1000)
    histogram = Histogram(ITL_BUCKETS_S)
    histogram.add(values)
    cumulative = np.cumsum(histogram.state().counts)
    assert cumulative[:-1].tolist() == [int((values <= bound).sum()) for bound in ITL_BUCKETS_S]
    assert cumulative[-1] == 1000


@pytest.mark.parametrize("seed", range(3))
def test_every_token_and_end_is_measured_once(seed: int) -> None:
    stack = Stack()
    stack.add_runner(HashBackend(num_slots=4, block_size=8, num_blocks=64, max_step_tokens=64, context_length=256))
    for index in range(3):
        stack.submit([1, 2, 3 + index], 2 * BATCH)
    stack.run(random.Random(seed))
    snapshot = stack.engine.snapshots.take_snapshot()
    tokens = sum(len(stream.tokens) for stream in stack.streams.values())
    assert sum(snapshot.ttft_s.counts) == 3
    assert sum(snapshot.itl_s.counts) == tokens - 3
    assert sum(snapshot.e2e_s.counts) == 3 == sum(snapshot.ends.values())
    assert set(snapshot.ends) <= {FinishReason.STOP, FinishReason.LENGTH}
    assert sum(snapshot.step_s.counts) == sum(snapshot.step_rows.counts) <= snapshot.status.totals.plans
    assert snapshot.waiting == 0 and snapshot.status.totals.sampled_tokens == tokens
    assert stack.engine.snapshots.take_snapshot().itl_s == snapshot.itl_s, "asking counts nothing twice"
