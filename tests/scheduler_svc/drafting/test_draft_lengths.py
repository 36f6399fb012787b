"""The lengths of drafts on imaginary runners: the most tokens a second, and never much fewer than without drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from scheduler_svc.drafting.draft_lengths import PROBE_EVERY
from scheduler_svc.policy import DraftRows, Drafts, Load, Policy, PolicyGuard, PolicyParameters
from tests.support.draft_world import DraftWorld, Seconds, best_rate
from tests.support.thoroughness import choice, count


def gpu_s(rows: int, drafts: float) -> float:
    """Returns seconds about as an H200 takes them for 8B: a few positions are free for few rows."""
    extra = 0.1 + 0.045 * rows * (rows > 16) + 0.004 * drafts + 0.014 * max(0.0, drafts - 60) if drafts else 0.0
    return 1e-3 * (4.68 + 0.018 * rows + extra)


def cpu_s(rows: int, drafts: float) -> float:
    """Returns seconds of a runner that computes each position."""
    return 1e-3 * (20 + 3 * rows + 2.2 * drafts)


def experts_s(rows: int, drafts: float) -> float:
    """Returns seconds of a mixture of experts: more positions read more experts, until all are read."""
    return 1e-3 * (3 + 4 * (1 - np.exp(-(rows + drafts) / 40)) + 0.01 * (rows + drafts))


MACHINES = ((gpu_s, True), (cpu_s, False), (experts_s, True))
CASES = [(machine, rows, measured) for machine in MACHINES for rows in (1, 8, 64, 256) for measured in (True, False)]


@pytest.mark.parametrize(("machine", "rows", "measured"), choice(CASES, in_ci=CASES[2:16:5]))
def test_a_drafter_that_is_always_wrong_costs_less_than_two_hundredths_after_the_first_steps(
    machine: tuple[Seconds, bool], rows: int, measured: bool
) -> None:
    world = DraftWorld(rows, machine[0], lambda step: np.zeros(rows), cuda=machine[1], measured=measured)
    assert world.run(50) > 0.9
    assert world.run(count(2000, in_ci=400)) > 0.98
    drafted = np.array([np.zeros(rows) if drafts is None else drafts for drafts in world.planned[100:]])
    probes = (drafted > 0).mean(axis=0)
    assert probes.max() < (1.3 if rows > 1 else 2) / PROBE_EVERY, "one row of a GPU drafts nearly for free"


@pytest.mark.parametrize(("machine", "rows", "measured"), choice(CASES, in_ci=[CASES[7], CASES[20]]))
@pytest.mark.parametrize("acceptance", [0.7, 0.9])
def test_as_many_are_drafted_as_is_best(
    machine: tuple[Seconds, bool], rows: int, measured: bool, acceptance: float
) -> None:
    seconds, cuda = machine
    world = DraftWorld(rows, seconds, lambda step: np.full(rows, acceptance), cuda=cuda, measured=measured)
    world.run(150)
    best = best_rate(seconds, rows, acceptance)
    assert world.run(100) > max(0.975, 0.93 * best if best > 1.3 else 0.0)


def test_rows_that_accept_draft_and_others_do_not() -> None:
    world = DraftWorld(16, cpu_s, lambda step: np.where(np.arange(16) % 2, 0.9, 0.0))
    world.run(150)
    drafts = np.mean([np.zeros(16) if drafts is None else drafts for drafts in world.planned[50:]], axis=0)
    assert drafts[1::2].min() > 2 > 0.3 > drafts[::2].max()
    assert world.run(200) > 1.2


@pytest.mark.parametrize("machine", [(gpu_s, True), (cpu_s, False)])
def test_a_hopeless_row_beside_good_ones_drafts_in_one_step_of_fifty(machine: tuple[Seconds, bool]) -> None:
    """Also in the graphs of a GPU, where its drafts take no time."""
    world = DraftWorld(8, machine[0], lambda step: np.where(np.arange(8) < 6, 0.8, 0.0), cuda=machine[1])
    world.run(150)
    before = world.steps
    assert world.run(400) > 1.2
    drafted = np.array([np.zeros(8) if drafts is None else drafts for drafts in world.planned[before:]])
    assert (drafted > 0).mean(axis=0)[6:].max() <= 1.3 / PROBE_EVERY
    assert drafted[:, 6:].max() == 1 and (drafted > 0).mean(axis=0)[:6].min() > 0.5


def test_a_hopeless_row_that_becomes_good_drafts_at_once() -> None:
    world = DraftWorld(8, gpu_s, lambda step: np.where(np.arange(8) < 6, 0.8, 0.8 * (step > 300)), cuda=True)
    world.run(300 + 2 * PROBE_EVERY)
    last = [np.zeros(8) if drafts is None else drafts for drafts in world.planned[-PROBE_EVERY + 10 :]]
    assert np.mean(last, axis=0)[6:].min() > 1


def test_a_text_that_begins_to_be_predictable_is_noticed_and_one_that_ceases_to_be_too() -> None:
    world = DraftWorld(8, cpu_s, lambda step: np.full(8, 0.85 * (step // 400 % 2)))
    world.run(400 + PROBE_EVERY + 10)
    assert world.run(300) > 1.3
    world.run(80)
    assert world.run(200) > 0.97


def test_random_text_with_a_drafter_that_is_mostly_silent_is_as_fast() -> None:
    few, rarely = (lambda step: np.full(8, 0.3)), (lambda step: np.full(8, 0.04))
    for seconds, cuda in ((gpu_s, True), (cpu_s, False)):
        world = DraftWorld(8, seconds, rarely, few, cuda=cuda, renewed=0.01)
        world.run(50)
        assert world.run(count(2000, in_ci=300)) > 0.985


def test_between_probes_the_scheduler_need_not_look() -> None:
    world = DraftWorld(4, cpu_s, lambda step: np.zeros(4))
    world.run(200)
    looked = 0
    for _ in range(200):
        looked += world.drafting.wants(world.steps, world.guard)
        world.step()
    assert looked <= 2 * 200 / PROBE_EVERY + 2
    without = DraftWorld(4, cpu_s, lambda step: np.zeros(4), max_drafts=0)
    without.run(5)
    assert without.planned == [None] * 5


def test_a_target_for_the_time_between_tokens_is_kept() -> None:
    world = DraftWorld(8, cpu_s, lambda step: np.full(8, 0.95), noise=0.0)
    world.itl_target_s = cpu_s(8, 20)
    world.run(100)
    drafts = [int(drafts.sum()) for drafts in world.planned[20:] if drafts is not None]
    assert 8 <= max(drafts) <= 21, "none takes longer than the target"
    world.itl_target_s = cpu_s(8, 0) / 2
    world.run(100)
    assert max(int(drafts.sum()) for drafts in world.planned[120:] if drafts is not None) > 30, "it is missed anyway"


def test_rows_near_their_end_or_without_permission_draft_no_more_than_they_may() -> None:
    world = DraftWorld(4, lambda rows, drafts: 0.01 + 1e-6 * drafts, lambda step: np.full(4, 0.9))
    world.table.limit[:] = world.table.known[0] + np.array([1, 2, 4, 1000])
    world.run(20)
    assert world.planned[-1] is not None
    assert world.planned[-1].tolist() == [0, 1, 3, 7]
    world.table.speculates[:] = False
    world.run(5)
    assert world.planned[-1] is None


class Halved(Policy):
    """Half of the default, and what the rows say."""

    name = "halved"
    seen: list[Any]

    def drafts(self, load: Load, rows: DraftRows) -> Drafts:
        self.seen = [len(rows), rows.request(0).tenant, float(rows.acceptance[0]), rows.seconds(rows.most)]
        return rows.best(load) // 2


class Answer(Policy):
    """Answers by a function of the test."""

    name = "answer"
    answer: Callable[[DraftRows], Any]

    def drafts(self, load: Load, rows: DraftRows) -> Drafts:
        drafts: Drafts = self.answer(rows)
        return drafts


def test_a_policy_decides_by_the_rows() -> None:
    policy = Halved(PolicyParameters())
    world = DraftWorld(1, gpu_s, lambda step: np.full(1, 0.95), policy=policy)
    world.table.sequences[0] = type("Any", (), {})()
    world.run(60)
    assert world.planned[-1] is not None
    assert world.planned[-1].tolist() == [3]
    assert policy.seen[:2] == [1, "t"] and policy.seen[2] > 0.8
    assert policy.seen[3] == pytest.approx(1.02 * gpu_s(1, 7), rel=0.05)
    assert not world.guard.failures


def _fail(rows: DraftRows) -> Any:
    raise RuntimeError("chaos")


WRONG: list[Callable[[DraftRows], Any]] = [
    _fail,
    lambda rows: None,
    lambda rows: [1],
    lambda rows: [1.0, 2.0, 3.0],
    lambda rows: [1, -1, 2],
    lambda rows: "123",
    lambda rows: [1, 2, 1 << 80],
    lambda rows: np.ones((3, 1), np.int64),
    lambda rows: np.ones(3),
    lambda rows: np.full(3, np.nan),
    lambda rows: rows.acceptance.__setitem__(0, 1.0),
    lambda rows: {1, 2, 3},
]


@pytest.mark.parametrize("answer", WRONG)
def test_a_policy_that_fails_drafts_nothing_and_is_counted(answer: Callable[[DraftRows], Any]) -> None:
    policy = Answer(PolicyParameters())
    policy.answer = answer
    world = DraftWorld(3, gpu_s, lambda step: np.full(3, 0.9), policy=policy)
    world.run(4)
    assert world.planned == [None] * 4
    assert world.guard.failures == 4
    assert "drafts()" in world.guard.last_failure


def test_a_policy_that_hangs_drafts_nothing() -> None:
    def hang(rows: DraftRows) -> Any:
        while True:
            pass

    policy = Answer(PolicyParameters())
    policy.answer = hang
    world = DraftWorld(3, gpu_s, lambda step: np.full(3, 0.9), policy=policy)
    world.guard = PolicyGuard(policy, 0.01)
    world.run(1)
    world.guard.close()
    assert world.planned == [None]
    assert (world.guard.failures, world.guard.overruns) == (1, 1)


@pytest.mark.parametrize(
    "answer", [lambda rows: [0, 3, 99], lambda rows: (0, 3, 7), lambda rows: np.array([0, 3, 8], np.uint16)]
)
def test_what_a_policy_returns_is_cut_to_what_rows_may(answer: Callable[[DraftRows], Any]) -> None:
    policy = Answer(PolicyParameters())
    policy.answer = answer
    world = DraftWorld(3, gpu_s, lambda step: np.full(3, 0.9), policy=policy)
    world.run(2)
    drafts: npt.NDArray[np.int32] | None = world.planned[-1]
    assert drafts is not None
    assert (drafts.tolist(), drafts.dtype) == ([0, 3, 7], np.int32)
    assert not world.guard.failures


def test_the_most_drafts_of_a_gpu_have_graphs_of_their_own() -> None:
    """A runner with at most 4 drafts computes 5 places a row, not 6."""
    world = DraftWorld(64, gpu_s, lambda step: np.zeros(64), cuda=True, max_drafts=4)
    charged = world.step_times.verifying.charged
    assert [charged(64, 64, most) for most in range(5)] == [64, 64 * 1, 64 * 3, 64 * 3, 64 * 4]
