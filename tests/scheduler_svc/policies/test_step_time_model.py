"""The step-time model against numpy, and on steps of known times."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler_svc.policies.step_time_model import StepTimeModel, nonnegative_solution
from scheduler_svc.policy import StepReport


def by_numpy(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    used = list(range(len(moment)))
    gram = gram + np.diag(1e-4 * gram.diagonal() + 1e-9)
    while used:
        weights = np.linalg.solve(gram[np.ix_(used, used)], moment[used])
        if weights.min() >= 0:
            solution = np.zeros(len(moment))
            solution[used] = weights
            return solution
        del used[int(weights.argmin())]
    return np.zeros(len(moment))


@pytest.mark.parametrize("seed", range(40))
def test_solutions_are_those_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = rng.uniform(0, 3, (rng.integers(1, 30), 4)) * rng.choice([0, 1], (1, 4), p=[0.2, 0.8])
    times = inputs @ rng.uniform(-1, 3, 4) + rng.normal(0, 0.1, len(inputs))
    gram, moment = inputs.T @ inputs, inputs.T @ times
    found = nonnegative_solution(gram.tolist(), moment.tolist())
    assert min(found) >= 0
    assert found == pytest.approx(by_numpy(gram, moment), rel=1e-6, abs=1e-9)


def test_times_that_follow_the_model_are_predicted() -> None:
    rng = random.Random(1)
    model = StepTimeModel()
    for _ in range(400):
        prefill, rows, context = rng.choice([0, rng.randrange(4000)]), rng.randrange(1, 256), rng.randrange(300_000)
        seconds = 0.005 + 2e-5 * prefill + 1e-5 * rows + 3e-8 * context
        model.observe(StepReport(0.0, rows, rows, seconds, seconds, rows, prefill, context))
    assert model.seconds(1000, 100, 100_000) == pytest.approx(0.005 + 0.02 + 0.001 + 0.003, rel=0.01)
    within = model.prefill_tokens_within(0.05, 100, 100_000)
    assert model.seconds(within, 100, 100_000) * model.tail_factor == pytest.approx(0.05, rel=1e-3)


def test_steps_that_take_their_time_by_the_tile() -> None:
    """Rows and prompts fill tiles of 128 positions; budgets end with a tile."""
    rng = random.Random(2)
    model = StepTimeModel()
    for _ in range(400):
        prefill, rows, context = rng.choice([0, rng.randrange(1, 4000)]), rng.randrange(1, 100), rng.randrange(300_000)
        tiles = -(-(prefill + rows) // 128) if prefill else 0
        seconds = 0.005 + 128 * 2e-5 * tiles + 3e-8 * context
        model.observe(StepReport(0.0, rows, rows, seconds, seconds, rows, prefill, context, tile_tokens=128))
    full, over = (model.seconds(prefill, 60, 100_000, 128) for prefill in (1024 - 60, 1025 - 60))
    assert full == pytest.approx(0.005 + 8 * 128 * 2e-5 + 0.003, rel=0.02)
    assert over - full == pytest.approx(128 * 2e-5, rel=0.05)
    within = model.prefill_tokens_within(0.05, 60, 100_000, 128)
    assert (within + 60) % 128 == 0
    longest = 0.05 / model.tail_factor
    assert model.seconds(within, 60, 100_000, 128) <= longest < model.seconds(within + 1, 60, 100_000, 128)
