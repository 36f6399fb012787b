"""Times of steps that verify drafts: measured, observed, and unknown; the fit of other steps does not see them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from roster_protos import plan_pb2
from scheduler_svc.step_times.step_time_model import StepTimeModel
from tests.support.step_costs import costs_of


def decode_s(decode: list[tuple[int, int]], chunks: list[tuple[int, int]]) -> float:
    positions = len(decode) + sum(count for _, count in chunks)
    return 0.004 + 2e-5 * positions + 3e-8 * sum(start for start, _ in decode) + 0.001 * bool(chunks)


def verify_s(rows: int, drafts: float) -> float:
    """Returns seconds with 256 positions of context per row; what drafts add is not linear."""
    return decode_s([(256, 1)] * rows, []) + 0.0003 * bool(drafts) + 1e-5 * drafts + 4e-5 * max(0.0, drafts - 60)


def measured(rows: tuple[int, ...] = (1, 8, 64, 256), drafts: tuple[int, ...] = (1, 3, 7)) -> list[plan_pb2.StepCost]:
    return costs_of(decode_s) + [
        plan_pb2.StepCost(decode_rows=n, context=256 * n, drafts=k, step_ns=round(1e9 * verify_s(n, n * k)))
        for n in rows
        for k in drafts
    ]


def note(model: StepTimeModel, rows: int, drafts: int, seconds: float, verified: int | None = None) -> None:
    starts, counts = np.full(rows, 256, np.int32), np.full(rows, 1 + drafts, np.int32)
    drafted = np.full(rows, drafts if verified is None else verified, np.int32)
    model.note(starts, counts, rows, 1.02 * seconds, seconds, False, drafted if drafts else None)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_measured_steps_are_predicted(on_gpu: bool) -> None:
    model = StepTimeModel(1, on_gpu, measured(), max_drafts=7)
    for rows in (1, 8, 64, 256):
        for drafts in (0, 1, 3, 5, 7):
            assert model.verify_s(rows, rows * drafts, 256 * rows) == pytest.approx(
                verify_s(rows, rows * drafts), rel=0.06
            )
    assert model.verify_s(4, 12, 1024) == pytest.approx(verify_s(4, 12), rel=0.05), "between measured rows"
    assert model.verify_s(8, 24, 80_000) == pytest.approx(verify_s(8, 24) + 3e-8 * 77_952, rel=0.1), "a longer context"
    curve = model.verifying.curve(64, 64 * 256)
    assert (np.diff(curve) >= 0).all()


def test_steps_with_drafts_leave_the_fit_of_others_as_it_is() -> None:
    rng, plain, drafting = random.Random(1), StepTimeModel(costs=costs_of(decode_s)), None
    drafting = StepTimeModel(costs=measured(), max_drafts=7)
    for number in range(300):
        rows, prompt = rng.randrange(1, 90), rng.randrange(2) * rng.randrange(1, 900)
        starts = np.array([256] * rows + [0] * (prompt > 0), np.int32)
        counts = np.array([1] * rows + [prompt] * (prompt > 0), np.int32)
        seconds = 1.2 * decode_s([(256, 1)] * rows, [(0, prompt)] if prompt else [])
        for model in (plain, drafting):
            model.note(starts, counts, rows, seconds, seconds)
        if number % 3 == 0:
            note(drafting, rows, 5, 9 * verify_s(rows, 5 * rows))
    for prompt, rows in ((0, 10), (500, 10), (900, 60)):
        expected_s = plain.seconds(prompt, rows, 256 * rows)
        assert drafting.seconds(prompt, rows, 256 * rows) == pytest.approx(expected_s, rel=0.03)
    assert drafting.expected_s(starts, counts, rows) == pytest.approx(plain.expected_s(starts, counts, rows), rel=0.03)


@pytest.mark.parametrize("known", [True, False])
def test_observed_steps_are_followed_whatever_was_measured(known: bool) -> None:
    """Half again as long as measured, or not measured at all; one pause changes little."""
    rng, factor = random.Random(2), 1.5
    model = StepTimeModel(costs=measured() if known else (), max_drafts=7)
    assert (model.verify_s(8, 24, 2048) > 0) == known
    assert model.verifying.knows_undrafted(8) is known
    for _ in range(400):
        drafts = rng.choice([0, 0, 1, 3, 5])
        note(model, 8, drafts, factor * verify_s(8, 8 * drafts) * rng.gauss(1, 0.03))
        model.verify_s(8, 24, 2048)
    assert model.verifying.knows_undrafted(8)
    for drafts in (0, 1, 3, 5):
        assert model.verify_s(8, 8 * drafts, 2048) == pytest.approx(1.02 * factor * verify_s(8, 8 * drafts), rel=0.08)
    before_s = model.verify_s(8, 24, 2048)
    note(model, 8, 3, 30.0)
    assert model.verify_s(8, 24, 2048) == pytest.approx(before_s, rel=0.1)


def test_what_was_never_observed_follows_what_was() -> None:
    model = StepTimeModel(costs=costs_of(decode_s), max_drafts=7)
    before_s = model.verify_s(64, 64 * 7, 64 * 256)
    for _ in range(60):
        note(model, 64, 0, verify_s(64, 0))
        note(model, 64, 1, verify_s(64, 0) + 1e-4)
    model.verify_s(64, 0, 64 * 256)
    assert verify_s(64, 0) < model.verify_s(64, 64 * 7, 64 * 256) < before_s, "one draft each is nearly free"


def test_a_gpu_computes_the_drafts_of_its_graph_and_a_cpu_those_that_there_are() -> None:
    starts, counts = np.full(4, 256, np.int32), np.array([1, 3, 1, 1], np.int32)
    cpu, gpu = StepTimeModel(costs=measured(), max_drafts=7), StepTimeModel(1, True, measured(), 7)
    assert gpu.expected_s(starts, counts, 4, True) == pytest.approx(gpu.verify_s(4, 12, 1024))
    assert cpu.expected_s(starts, counts, 4, True) == pytest.approx(cpu.verify_s(4, 2, 1024))
    for _ in range(200):
        note(cpu, 4, 5, verify_s(4, 4), verified=1)
        cpu.verify_s(4, 4, 1024)
    counts[:] = 6
    assert cpu.expected_s(starts, counts, 4, True) == pytest.approx(cpu.verify_s(4, 4, 1024), rel=0.05)


def test_a_runner_without_a_drafter_remembers_no_decode_steps() -> None:
    model = StepTimeModel()
    for _ in range(64):
        note(model, 8, 0, 0.01)
    assert not model.verifying.knows_undrafted(8)
    assert model.expected_s(np.zeros(8, np.int32), np.full(8, 2, np.int32), 8, True) == 0.0
