"""The step-time model against numpy, and on steps of known times."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from roster_protos import plan_pb2
from scheduler_svc.step_times.error_tail import ErrorTail
from scheduler_svc.step_times.least_squares import nonnegative_solution
from scheduler_svc.step_times.step_time_model import StepTimeModel
from tests.support.step_costs import costs_of

Step = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""(start, count) of decoding rows and of chunks."""


def seconds_of(decode: list[tuple[int, int]], chunks: list[tuple[int, int]], tile: int = 1) -> float:
    """Returns the time of a step on an imaginary runner."""
    positions = len(decode) + sum(count for _, count in chunks)
    pairs = sum(count * (start + count / 2) for start, count in chunks)
    charged = -(-positions // tile) * tile
    context = sum(start for start, _ in decode)
    return 0.002 + 0.001 * bool(chunks) + 2e-5 * charged + 1e-6 * len(decode) + 4e-8 * context + 2e-9 * pairs


def step(rng: random.Random) -> Step:
    decode = [(rng.randrange(3000), 1) for _ in range(rng.randrange(1, 100))]
    chunks = [(rng.choice([0, rng.randrange(9000)]), rng.randrange(1, 2000)) for _ in range(rng.choice([0, 1, 2]))]
    return decode, chunks


def note(model: StepTimeModel, one: Step, step_s: float, runner_s: float = 0.0) -> None:
    starts, counts = np.array([*one[0], *one[1]], np.int32).T
    model.note(starts, counts, len(one[0]), step_s, runner_s)


def seconds_by(model: StepTimeModel, one: Step) -> float:
    """Returns the predicted seconds of a step with at most one chunk."""
    start, count = one[1][0] if one[1] else (0, 0)
    return model.seconds(count, len(one[0]), sum(start for start, _ in one[0]), start)


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


@pytest.mark.parametrize(("tile", "measured"), [(1, True), (128, True), (1, False), (128, False)])
def test_it_predicts_from_what_was_measured_or_observed(tile: int, measured: bool) -> None:
    """The runner's own time counts where it is known: the scheduler sees it late by a third."""
    rng = random.Random(1)
    model = StepTimeModel(tile, costs=costs_of(lambda *one: seconds_of(*one, tile)) if measured else ())
    assert model.known == measured
    assert model.row_s == pytest.approx(seconds_of([(256, 1)], [], tile) if measured else 0.0)
    if not measured:
        for number in range(1200):
            one = step(rng)
            taken_s = seconds_of(*one, tile)
            note(model, one, taken_s * (1.3 if number % 2 else 1), taken_s if number % 2 else 0.0)
            if not number % 20:
                model.position_s  # noqa: B018  (noted steps are used when a policy asks)
    assert model.known
    for decode, chunks in (step(rng) for _ in range(50)):
        one = decode, chunks[:1]
        assert seconds_by(model, one) == pytest.approx(seconds_of(*one, tile), rel=0.03)
    assert model.position_s == pytest.approx(2e-5, rel=0.05)


@pytest.mark.parametrize("tile", [1, 128])
def test_a_step_with_as_many_positions_as_fit_takes_that_long_and_one_more_is_too_many(tile: int) -> None:
    model = StepTimeModel(tile, costs=costs_of(lambda *one: seconds_of(*one, tile)))
    for start, left in ((0, math.inf), (8000, math.inf), (8000, 300)):
        within = model.prefill_tokens_within(0.04, 60, 100_000, start, left)
        if tile > 1:
            assert (within + 60) % tile == 0
        within = int(within)
        pairs = (min(left, within), within)

        def seconds(more: int, start: int = start, pairs: tuple[float, int] = pairs) -> float:
            early = start * 2e-9 * pairs[0]
            return seconds_of([(0, 1)] * 60, [(0, pairs[1] + more)], tile) + 4e-8 * 100_000 + early

        assert seconds(0) <= 0.04 * 1.005
        assert seconds(1 if tile > 1 else 40) > 0.04 * 0.995
    assert model.prefill_tokens_within(0.004, 60, 100_000) < 0, "decoding alone takes longer"


def test_a_runner_that_became_slower_is_followed_and_prompts_are_not_forgotten_meanwhile() -> None:
    rng = random.Random(3)
    model = StepTimeModel(128, costs=costs_of(lambda *one: seconds_of(*one, 128)))
    for number in range(1500):
        one = step(rng)
        note(model, one, 1.5 * seconds_of(*one, 128))
        if not number % 20:
            model.position_s  # noqa: B018
    prompt: Step = [(1000, 1)] * 30, [(0, 994)]
    slower = seconds_by(model, prompt)
    assert slower == pytest.approx(1.5 * seconds_of(*prompt, 128), rel=0.06)
    for number in range(50_000):
        note(model, ([(1000, 1)] * 30, []), 1.5 * seconds_of([(1000, 1)] * 30, [], 128))
        if not number % 1000:
            model.position_s  # noqa: B018
    assert seconds_by(model, prompt) == pytest.approx(slower, rel=0.1)


def test_a_time_that_contains_the_plans_way_says_nothing_about_the_step() -> None:
    model = StepTimeModel(costs=costs_of(seconds_of))
    one: Step = [(500, 1)] * 8, [(0, 300)]
    expected_s = seconds_by(model, one)
    starts, counts = np.array([*one[0], *one[1]], np.int32).T
    for _ in range(500):
        model.note(starts, counts, 8, 0.5, 0.0, waited=True)
    assert seconds_by(model, one) == pytest.approx(expected_s)


def test_delays_take_at_most_a_fifth_of_a_target() -> None:
    model = StepTimeModel(costs=costs_of(seconds_of))
    assert model.planned_s(0.03, 0.99) == pytest.approx(0.03 - model.delay_s(0.99)) and model.delay_s(0.99) < 0.006
    one: Step = [(500, 1)] * 8, [(0, 300)]
    for _ in range(500):
        note(model, one, seconds_of(*one) + 0.02, seconds_of(*one))
        model.position_s  # noqa: B018
    assert model.delay_s(0.99) > 0.019
    assert model.planned_s(0.03, 0.99) == pytest.approx(0.024)
    assert seconds_by(model, one) == pytest.approx(seconds_of(*one), rel=0.03), "the runner's own time counts"


def test_the_tail_is_the_share_of_steps_that_take_longer() -> None:
    rng, tail = random.Random(4), ErrorTail()
    assert 0 < tail.quantile_s(0.8) <= tail.quantile_s(0.99) < 0.005
    for _ in range(3000):
        tail.add(rng.gauss(0.0, 0.01))
    for share, expected in ((0.9, 1.282), (0.95, 1.645), (0.99, 2.326)):
        assert tail.quantile_s(share) == pytest.approx(0.01 * expected, rel=0.2)
    for _ in range(5000):
        tail.add(-0.001)
    assert tail.quantile_s(0.95) == 0.0, "what was slow is forgotten"
    tail.add(1e9)
    assert tail.quantile_s(0.9999999) <= 4.5


def test_costs_of_no_time_are_ignored() -> None:
    assert not StepTimeModel(costs=[plan_pb2.StepCost(decode_rows=1)]).known


def test_prompt_positions_are_bounded_where_none_seems_to_cost_anything() -> None:
    """Steps of equal time, whatever their size, show no time per position."""
    costs = [
        plan_pb2.StepCost(decode_rows=rows, prompt_positions=prompt, step_ns=2_000_000)
        for rows, prompt in ((1, 0), (64, 0), (0, 64), (0, 512))
    ]
    model = StepTimeModel(costs=costs)
    assert model.prefill_tokens_within(0.005, 1, 100) == 2 * 512
    assert model.prefill_tokens_within(0.001, 1, 100) < 0
