"""Fitting: known coefficients are recovered, outliers are ignored, and no coefficient is negative."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler_svc.simulator.calibration.cost_fit import TimedStep, fit_cost_model, nonnegative_least_squares
from scheduler_svc.simulator.cost_model import CostModel, RunnerShape, StepWork

SHAPE = RunnerShape(slots=64, kv_tokens=65536, step_tokens=2048)


def made_up_steps(model: CostModel, rng: random.Random, noise: float) -> list[TimedStep]:
    """Decoding batches and prompts of many sizes, timed by the model."""
    steps = []
    for _ in range(400):
        rows, context = rng.randint(0, 64), rng.randint(1, 1000)
        chunk, start = (rng.randint(2, 2000), rng.randint(0, 2000)) if not rows or rng.random() < 0.5 else (0, 0)
        work = StepWork(
            tokens=rows + chunk,
            sequences=rows + (chunk > 0),
            context_tokens=rows * context + (start + chunk if chunk else 0),
            prefill_pairs=chunk * start + chunk * (chunk + 1) / 2,
        )
        steps.append(TimedStep(work, model.step_seconds(work) * rng.lognormvariate(0, noise)))
    return steps


TRUE = CostModel(name="true", fixed_s=4e-3, token_s=2e-5, sequence_s=8e-6, context_s=3e-8, pair_s=2e-9, runner=SHAPE)


def test_known_coefficients_come_back() -> None:
    fitted, error = fit_cost_model("f", "", made_up_steps(TRUE, random.Random(1), 0.0), SHAPE)
    for name in ("fixed_s", "token_s", "sequence_s", "context_s", "pair_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert fitted.free_tokens == 0
    assert error.p90 < 1e-3


def test_noise_and_disturbed_steps_move_them_little() -> None:
    rng = random.Random(2)
    steps = made_up_steps(TRUE, rng, 0.03)
    disturbed = [TimedStep(s.work, s.seconds * 5) if rng.random() < 0.05 else s for s in steps]
    fitted, error = fit_cost_model("f", "", disturbed, SHAPE)
    assert fitted.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.05)
    assert fitted.token_s == pytest.approx(TRUE.token_s, rel=0.05)
    assert error.left_out >= 15
    assert error.spread == pytest.approx(0.03, rel=0.3)


def test_free_positions_are_found() -> None:
    true = TRUE.model_copy(update={"free_tokens": 128})
    fitted, _ = fit_cost_model("f", "", made_up_steps(true, random.Random(3), 0.01), SHAPE)
    assert fitted.free_tokens == 128
    assert fitted.token_s == pytest.approx(true.token_s, rel=0.05)


def test_tiles_are_found_where_there_are_some() -> None:
    rng = random.Random(5)
    true = TRUE.model_copy(update={"free_tokens": 64, "tile_tokens": 128})
    fitted, error = fit_cost_model("f", "", made_up_steps(true, rng, 0.01), SHAPE, tile_tokens=128)
    assert (fitted.free_tokens, fitted.tile_tokens) == (64, 128)
    assert fitted.token_s == pytest.approx(true.token_s, rel=0.05)
    assert error.median < 0.02
    fitted, _ = fit_cost_model("f", "", made_up_steps(TRUE, rng, 0.01), SHAPE, tile_tokens=128)
    assert fitted.tile_tokens == 1


def test_positions_are_charged_by_the_tile() -> None:
    true = TRUE.model_copy(update={"free_tokens": 100, "tile_tokens": 128})
    seconds = {tokens: true.step_seconds(StepWork(tokens, 1, 0, 0.0)) for tokens in (1, 100, 101, 128, 129, 256)}
    assert seconds[1] == seconds[100] < seconds[101] == seconds[128] < seconds[129] == seconds[256]
    assert seconds[256] - seconds[128] == pytest.approx(128 * true.token_s)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        fit_cost_model("f", "", made_up_steps(TRUE, random.Random(4), 0.0)[:7], SHAPE)


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares_is_optimal(seed: int) -> None:
    """Checks the Karush-Kuhn-Tucker conditions: no gradient points into the feasible side, and it is 0 where x > 0."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(30, 5)), rng.normal(size=30)
    x = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-6
