"""Acceptance of rows, learned from their results, and how many drafts are best for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from roster_common.link_protocol import GRAPH_DRAFTS
from scheduler_svc.drafting.acceptance import Acceptance, Counts
from scheduler_svc.drafting.planner import DraftPlanner
from scheduler_svc.step_times.verify_times import KNOTS_COLUMN
from tests.support.thoroughness import count

SLOTS = np.arange(12)


def epochs(first: int) -> npt.NDArray[np.int64]:
    return first + SLOTS


def told(drafts: int, chances: npt.NDArray[np.float64], results: int, seed: int = 1) -> Acceptance:
    """Returns the acceptance after results in which each row drafted as many."""
    rng, acceptance = np.random.default_rng(seed), Acceptance(len(SLOTS))
    acceptance.begin(SLOTS, epochs(1))
    asked: Counts = np.full(len(SLOTS), drafts, np.int32)
    for number in range(results):
        accepted = np.minimum(rng.geometric(1 - chances) - 1, drafts).astype(np.int32)
        acceptance.note(number, SLOTS, epochs(1), asked, asked, accepted)
    return acceptance


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_it_is_the_chance_of_a_draft_behind_accepted_ones_however_many_are_drafted(drafts: int) -> None:
    chances = np.linspace(0.05, 0.95, len(SLOTS))
    mean = np.mean([told(drafts, chances, 80, seed).of(SLOTS) for seed in range(6)], axis=0)
    assert np.abs(mean - chances).max() < 0.15
    assert np.abs(mean - chances).mean() < 0.05


def test_rows_that_are_alike_are_averaged_and_others_are_not() -> None:
    alike = told(1, np.full(len(SLOTS), 0.6), 12).of(SLOTS)
    others = told(1, np.where(SLOTS % 2, 0.95, 0.02), 12)
    assert np.abs(alike - 0.6).mean() < 0.13
    assert others.of(SLOTS)[1::2].min() > 0.75 > 0.15 > others.of(SLOTS)[::2].max()


def test_a_fresh_row_is_what_fresh_rows_usually_are() -> None:
    acceptance = told(3, np.full(len(SLOTS), 0.9), 30)
    fresh = acceptance.begin(SLOTS[:2], epochs(100)[:2])
    assert fresh.tolist() == [0, 1]
    assert acceptance.begin(SLOTS[:2], epochs(100)[:2]).tolist() == []
    assert acceptance.of(SLOTS[:2]) == pytest.approx(0.9, abs=0.08)
    none = np.zeros(2, np.int32)
    before = acceptance.of(SLOTS).copy()
    acceptance.note(31, SLOTS[:2], epochs(1)[:2], none + 3, none + 3, none)
    assert acceptance.of(SLOTS).tolist() == before.tolist(), "the result of a row that has left its slot"
    for number in range(32, 42):
        acceptance.note(number, SLOTS[:2], epochs(100)[:2], none + 3, none + 3, none)
    assert acceptance.of(SLOTS[:2]).max() < 0.3


def test_a_row_without_proposals_says_nothing_about_acceptance() -> None:
    acceptance = told(3, np.full(len(SLOTS), 0.7), 30)
    before, none = acceptance.of(SLOTS).copy(), np.zeros(len(SLOTS), np.int32)
    assert acceptance.share_of(SLOTS) == pytest.approx(1.0)
    for number in range(30, 35):
        acceptance.note(number, SLOTS, epochs(1), none + 3, none, none)
    assert acceptance.of(SLOTS) == pytest.approx(before)
    assert acceptance.share_of(SLOTS).max() < 0.05
    acceptance.note(35, SLOTS, epochs(1), none, none, none)
    assert acceptance.changes == 35, "no row was asked"


def rate(drafts: Counts, acceptance: npt.NDArray[np.float64], curve: npt.NDArray[np.float64], pads: bool) -> float:
    """Returns the tokens a second of a step, from the definition."""
    rows = len(drafts)
    tokens = rows + sum(float((p ** np.arange(1, k + 1)).sum()) for p, k in zip(acceptance, drafts, strict=True))
    graphs = [0, *GRAPH_DRAFTS]
    each = min(graph for graph in graphs if graph >= drafts.max()) if pads else drafts.sum() / rows
    return tokens / float(np.interp(each, KNOTS_COLUMN, curve))


@pytest.mark.parametrize("pads", [False, True])
def test_no_other_lengths_have_many_more_tokens_a_second(pads: bool) -> None:
    """Compared with any threshold of the marginal gains, or on a GPU any graph."""
    rng, planner = np.random.default_rng(3), DraftPlanner(7, pads)
    for _ in range(count(500, in_ci=15)):
        rows = int(rng.integers(1, 20))
        acceptance, share = rng.random(rows), np.ones(rows)
        most: Counts = rng.integers(0, 8, rows, np.int32)
        curve = 1 + np.cumsum(
            rng.random(len(KNOTS_COLUMN)) * rng.choice([0.02, 0.3]) * np.diff(KNOTS_COLUMN, prepend=0)
        )
        drafts, gain = planner.best(acceptance, share, most, curve)
        chosen = np.zeros(rows, np.int32) if drafts is None else drafts
        assert (chosen <= most).all()
        others = [np.zeros(rows, np.int32)]
        for place in np.linspace(0.02, 1, 50):
            with_gain = np.log(place) // np.log(acceptance)
            others.append(np.minimum(7 * place if pads else with_gain, most).astype(np.int32))
        best = max(rate(other, acceptance, curve, pads) for other in others)
        assert rate(chosen, acceptance, curve, pads) > 0.94 * best
        assert gain == pytest.approx(rate(chosen, acceptance, curve * 0 + 1, pads) - rows, abs=0.15 * rows)
