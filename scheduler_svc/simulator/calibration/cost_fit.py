"""Fits a cost model to timed steps by nonnegative least squares on relative errors.

Errors are relative so that the model is equally accurate for a decoding step and for a step of a whole prompt. The
coefficients are nonnegative because no work makes a step faster. Outliers, such as steps disturbed by another process,
are left out of a second fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.cost_model import CostModel, RunnerShape, StepWork, charged_tokens

FREE_TOKENS = (0, 16, 32, 64, 128, 256)
"""Candidates for the number of free positions."""
WORTH = 0.9
"""Free positions and tiles are used if they reduce the squared error below this share of the error without them."""
OUTLIER = 4.0
"""Scaled median absolute deviations from the median beyond which a step is left out."""

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class TimedStep:
    """A step's work and its time in seconds."""

    work: StepWork
    seconds: float


@dataclass(slots=True, frozen=True)
class FitError:
    """Relative errors |predicted / measured - 1| over the kept steps. `spread` is the standard deviation of the
    logarithm of measured / predicted, for `Setup.spread`."""

    median: float
    p90: float
    spread: float
    steps: int
    left_out: int


def fit_cost_model(
    name: str,
    source: str,
    steps: Sequence[TimedStep],
    runner: RunnerShape,
    *,
    link_s: float = 0.0,
    tile_tokens: int = 1,
) -> tuple[CostModel, FitError]:
    """Returns the model with the least squared relative error. Raises ValueError for fewer than 8 steps.

    `tile_tokens` is the tile size that is tried besides 1.
    """
    if len(steps) < 8:
        raise ValueError(f"{len(steps)} steps are too few to fit a cost model: at least 8 are needed")
    seconds = np.array([step.seconds for step in steps])
    kept = np.ones(len(steps), bool)
    for _ in range(2):
        shape, coefficients = _best([s for s, keep in zip(steps, kept, strict=True) if keep], tile_tokens)
        ratio = np.log(seconds / (_features([step.work for step in steps], shape) @ coefficients))
        kept = _inliers(ratio)
    error = np.abs(np.exp(-ratio[kept]) - 1)
    model = CostModel(
        name=name,
        source=source,
        fixed_s=coefficients[0],
        token_s=coefficients[1],
        free_tokens=shape.free_tokens,
        tile_tokens=shape.tile_tokens,
        sequence_s=coefficients[2],
        context_s=coefficients[3],
        pair_s=coefficients[4],
        link_s=link_s,
        runner=runner,
    )
    quality = FitError(
        float(np.median(error)),
        float(np.percentile(error, 90)),
        float(ratio[kept].std()),
        int(kept.sum()),
        int((~kept).sum()),
    )
    return model, quality


class _Shape(NamedTuple):
    """The nonlinear parameters of a model."""

    free_tokens: int
    tile_tokens: int


def _features(works: Sequence[StepWork], shape: _Shape) -> Floats:
    """Returns the factors of the coefficients: (steps, 5)."""
    return np.array(
        [(1.0, charged_tokens(w.tokens, *shape), w.sequences, w.context_tokens, w.prefill_pairs) for w in works]
    )


def _best(steps: Sequence[TimedStep], tile_tokens: int) -> tuple[_Shape, Floats]:
    """Returns the best shape and its coefficients: the first, plain shape unless another reduces the error by
    `WORTH`."""
    works, seconds = [step.work for step in steps], np.array([step.seconds for step in steps])
    fits = []
    for shape in map(_Shape._make, product(FREE_TOKENS, sorted({1, tile_tokens}))):
        relative = _features(works, shape) / seconds[:, None]
        coefficients = nonnegative_least_squares(relative, np.ones(len(steps)))
        error = float(((relative @ coefficients - 1) ** 2).sum())
        fits.append((error, shape, coefficients))
    plain, best = fits[0], min(fits, key=lambda fit: fit[0])
    _, shape, coefficients = best if best[0] < WORTH * plain[0] else plain
    return shape, coefficients


def _inliers(log_ratio: Floats) -> npt.NDArray[np.bool_]:
    distance = np.abs(log_ratio - np.median(log_ratio))
    return distance <= OUTLIER * max(1.4826 * float(np.median(distance)), 1e-6)


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Minimizes |matrix x - target| for x >= 0 by active sets (Lawson and Hanson 1974). matrix: (rows, few columns)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    x = np.zeros(matrix.shape[1])
    active = np.zeros(matrix.shape[1], bool)
    for _ in range(10 * matrix.shape[1]):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[active] = -np.inf
        if gradient.max() <= 1e-10 * np.linalg.norm(target):
            break
        active[int(gradient.argmax())] = True
        x = _solve_active(matrix, target, x, active)
    return x / scale


def _solve_active(matrix: Floats, target: Floats, x: Floats, active: npt.NDArray[np.bool_]) -> Floats:
    """Solves least squares over the active columns, and deactivates columns whose coefficient would be negative.
    Modifies `active`."""
    while active.any():
        trial = np.zeros_like(x)
        trial[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        negative = active & (trial <= 0)
        if not negative.any():
            return trial
        steps = x[negative] / (x[negative] - trial[negative])
        x = x + steps.min() * (trial - x)
        active &= x > 1e-12
        x[~active] = 0.0
    return np.zeros_like(x)
