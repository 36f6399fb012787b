"""Simulated drafts: positions follow the runner's own counters, and what is right depends on the request alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.simulator.simulated_drafts import Run, SimulatedDrafts, WrongAcceptance

MOST = 5


def plan(rows: list[tuple[int, int, int, int]], admitted: dict[int, str] | None = None) -> plan_pb2.Plan:
    """Returns a plan of rows (slot, start, count, drafts) that all sample; `admitted`: request by slot, 10 tokens."""
    slots, starts, counts, drafts = zip(*rows, strict=True)
    made = plan_pb2.Plan(
        extent_slots=pack(list(slots)), extent_starts=pack(list(starts)), extent_counts=pack(list(counts))
    )
    made.extent_flags = b"\1" * len(rows)
    if any(drafts):
        made.extent_drafts = bytes(drafts)
    for slot, request_id in (admitted or {}).items():
        context = engine_pb2.SequenceContext(submit=engine_pb2.Submit(request_id=request_id))
        made.admissions.add(slot=slot, tokens=pack([1] * 10), prompt_len=10, context=context.SerializeToString())
    return made


def generated(
    drafts: SimulatedDrafts, lengths: list[int], request_id: str = "r"
) -> tuple[set[int], set[int], list[Run]]:
    """Returns the positions of accepted and of rejected drafts, and all runs; `lengths`: k of each step."""
    runs = [drafts.run(1, plan([(2, 0, 10, 0)], {2: request_id}))]
    for k in lengths:
        runs.append(drafts.run(1, plan([(2, -1, 1 + k, k)])))
    accepted: set[int] = set()
    rejected: set[int] = set()
    for before, run in pairwise(runs):
        assert run.first == before.first + before.token_counts, "it goes on where the row before ended"
        assert run.starts == run.first - 1 and 1 <= run.token_counts <= 1 + run.drafted
        first, count = int(run.first[0]), int(run.token_counts[0]) - 1
        accepted.update(range(first, first + count))
        rejected.update([first + count] if count < run.drafted[0] else [])
    return accepted, rejected, runs


def test_each_place_has_its_share() -> None:
    shares = (0.9, 0.5, 0.2)
    drafts = SimulatedDrafts(1, 4, MOST, shares, 7, {})
    *_, runs = generated(drafts, [MOST] * 2000)
    accepted = np.array([int(run.token_counts[0]) - 1 for run in runs[1:]])
    for place, share in enumerate((*shares, 0.2)):
        tried = (accepted >= place).sum()
        assert (accepted > place).sum() / tried == pytest.approx(share, abs=4 * (share * (1 - share) / tried) ** 0.5)


def test_what_is_right_depends_on_the_request_alone() -> None:
    """With an equal share at all places, a position's draft is right or wrong however long the runs are."""
    drafts, rng = SimulatedDrafts(2, 4, MOST, (0.6,), 3, {"own": (1.0,), "none": (0.0,)}), np.random.default_rng(1)
    right, wrong, _ = generated(drafts, [MOST] * 300)
    for lengths in ([1] * 300, rng.integers(0, 4, 300).tolist()):
        accepted, rejected, _ = generated(drafts, lengths)
        assert not accepted & wrong and not rejected & right and len(accepted & right) > 50
    assert generated(drafts, [MOST] * 300)[:2] == (right, wrong)
    assert generated(drafts, [MOST] * 300, "other")[0] & wrong, "each request has its own"
    assert generated(SimulatedDrafts(1, 4, MOST, (0.6,), 4, {}), [MOST] * 300)[0] & wrong, "and each seed"
    assert len(generated(drafts, [MOST] * 10, "own")[0]) == 10 * MOST
    assert not generated(drafts, [MOST] * 10, "none")[0]


@pytest.mark.parametrize("acceptance", [(), (1.5,), (0.5, -0.1)])
def test_impossible_shares_are_refused(acceptance: tuple[float, ...]) -> None:
    with pytest.raises(WrongAcceptance, match="from 0 to 1"):
        SimulatedDrafts(1, 1, MOST, acceptance, 0, {})
