"""Copies to and from the host pool that contradict the pools or tickets in flight are refused, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from runner_svc.tiers.kv_copier import Direction
from tests.support.plans import SAMPLE, admission, int32s, plan
from tests.support.spy_backend import SpyBackend
from tests.support.stepped_copier import SteppedCopier

TAG = bytes(range(20))

# Before each bad plan: 8 host blocks, of which 1 and 2 hold something. An offload of block 5 into host block 3 and a
# load of host block 1 into block 6 are in flight. Slot 0 has 6 tokens in blocks 1 and 2.
FAULTS: list[tuple[str, plan_pb2.Plan]] = [
    ("offload_sources has 3 bytes", plan_pb2.Plan(offload_sources=b"abc")),
    ("the load columns have different lengths", plan_pb2.Plan(load_targets=int32s([1]))),
    (
        "the offload tickets have 0 blocks, the columns 1",
        plan_pb2.Plan(offload_sources=int32s([7]), offload_targets=int32s([4]), offload_tags=TAG),
    ),
    ("load ticket 1: 0 blocks, must be at least 1", plan(loads=[[(2, 7)], []])),
    ("load ticket 0: -1 blocks, must be at least 1", plan_pb2.Plan(load_counts=int32s([-1]))),
    ("the load tickets have 1 blocks, the columns 0", plan_pb2.Plan(load_counts=int32s([1]))),
    ("offload_tags has 19 bytes, must be 20", plan(offloads=[[(7, 4, TAG[1:])]])),
    ("offload_tags has 20 bytes, must be 0", plan_pb2.Plan(offload_tags=TAG)),
    ("offload source 0: there is no block 21", plan(offloads=[[(21, 4, TAG)]])),
    ("offload source 0: there is no block 0", plan(offloads=[[(0, 4, TAG)]])),
    ("offload target 0: there is no host block 9", plan(offloads=[[(7, 9, TAG)]])),
    ("load source 1: there is no host block 0", plan(loads=[[(2, 7), (0, 8)]])),
    ("load target 0: there is no block -1", plan(loads=[[(2, -1)]])),
    ("copy 1: block 7 is copied twice", plan(offloads=[[(8, 4, TAG), (7, 5, TAG)], [(7, 6, TAG)]])),
    ("copy 0: block 4 is copied twice", plan(offloads=[[(7, 4, TAG), (8, 4, TAG)]])),
    ("copy 0: block 2 is copied twice", plan(loads=[[(2, 7), (2, 8)]])),
    ("is copied twice", plan(loads=[[(2, 7), (1, 7)]])),
    ("copy 0: block 7 is copied twice", plan(offloads=[[(7, 4, TAG)]], loads=[[(2, 7)]])),
    ("copy 0: block 2 is copied twice", plan(offloads=[[(7, 2, TAG)]], loads=[[(2, 8)]])),
    ("offload source 0: block 6 is in an unfinished copy", plan(offloads=[[(6, 4, TAG)]])),
    ("offload target 0: block 3 is in an unfinished copy", plan(offloads=[[(7, 3, TAG)]])),
    ("offload target 0: block 1 is in an unfinished copy", plan(offloads=[[(7, 1, TAG)]])),
    ("load source 0: block 3 is in an unfinished copy", plan(loads=[[(3, 7)]])),
    ("load source 0: host block 4 holds nothing", plan(loads=[[(4, 7)]])),
    ("load target 0: block 5 is in an unfinished copy", plan(loads=[[(2, 5)]])),
    ("load target 0: block 6 is in an unfinished copy", plan(loads=[[(2, 6)]])),
    ("purged host block 1: there is no host block 9", plan(purged=[8, 9])),
    ("purged_host_blocks has 3 bytes", plan_pb2.Plan(purged_host_blocks=b"abc")),
    ("append 0: block 5 is in an unfinished copy", plan(appends=[(0, 2, 5)])),
    ("append 0: block 6 is in an unfinished copy", plan(appends=[(0, 2, 6)])),
    ("append 0: block 7 is in an unfinished copy", plan(appends=[(0, 2, 7)], offloads=[[(7, 4, TAG)]])),
    ("append 0: block 7 is in an unfinished copy", plan(appends=[(0, 2, 7)], loads=[[(2, 7)]])),
    ("copy source 0: block 6 is in an unfinished copy", plan(copies=[(6, 7)])),
    ("copy target 0: block 5 is in an unfinished copy", plan(copies=[(7, 5)])),
    (
        "slot 1, block 0: block 6 is in an unfinished copy",
        plan(admissions=[admission(1, [1] * 5, [6, 7], num_computed=4)]),
    ),
    (
        "slot 1, block 0: block 5 is in an unfinished copy",
        plan(admissions=[admission(1, [1] * 5, [7, 5], num_computed=4)]),
    ),
]


def tag(number: int) -> bytes:
    return bytes([number]) * 20


@pytest.fixture
def copier() -> SteppedCopier:
    return SteppedCopier(SpyBackend().cache_regions, 8)


@pytest.fixture
def runner(copier: SteppedCopier) -> Runner:
    runner = Runner(SpyBackend(), copier=copier)
    runner.execute(1, plan(admissions=[admission(0, [1] * 6, [1, 2])], extents=[(0, 0, 6, SAMPLE)]))
    runner.execute(2, plan(extents=[(0, 6, 1, SAMPLE)], offloads=[[(3, 1, tag(1)), (4, 2, tag(2))]]))
    copier.copy_all(Direction.OFFLOAD)
    assert runner.execute(3, plan()).offloads_done == int32s([1])
    result = runner.execute(4, plan(extents=[(0, 7, 1, SAMPLE)], offloads=[[(5, 3, tag(3))]], loads=[[(1, 6)]]))
    assert (result.offloads_done, result.loads_done) == (b"", b"")
    return runner


@pytest.mark.parametrize(("reason", "bad"), FAULTS, ids=[reason for reason, _ in FAULTS])
def test_a_copy_that_contradicts_is_refused(runner: Runner, reason: str, bad: plan_pb2.Plan) -> None:
    before = runner._state.residents()  # a snapshot would wait for the copies
    with pytest.raises(PlanFault, match=reason.replace("(", r"\(")):
        runner.launch(5, bad)
    assert runner._state.residents() == before
    with pytest.raises(PlanFault, match="until a new session begins"):
        runner.launch(5, plan())


def test_the_same_copies_fit_once_their_tickets_have_ended(runner: Runner, copier: SteppedCopier) -> None:
    for direction in Direction:
        copier.copy_all(direction)
    again = plan(
        appends=[(0, 2, 5)],
        offloads=[[(6, 1, tag(4))]],
        loads=[[(3, 7)], [(2, 8)]],
        admissions=[admission(1, [1] * 5, [6, 9], num_computed=4)],
        extents=[(0, 8, 1, SAMPLE), (1, 4, 1, 0)],
    )
    result = runner.execute(5, plan())
    assert (result.offloads_done, result.loads_done) == (int32s([2]), int32s([1]))
    runner.execute(6, again)
    copier.finish()
    result = runner.execute(7, plan())
    assert (result.offloads_done, result.loads_done) == (int32s([3]), int32s([2, 3]))
    snapshot = runner.snapshot()
    assert snapshot.host_blocks == int32s([1, 2, 3])
    assert snapshot.host_tags == tag(4) + tag(2) + tag(3)


def test_what_is_purged_is_in_no_snapshot_whatever_is_being_copied(runner: Runner, copier: SteppedCopier) -> None:
    runner.execute(5, plan(extents=[(0, 8, 1, SAMPLE)], appends=[(0, 2, 8)], purged=[1, 3]))  # read, and being written
    copier.finish()
    result = runner.execute(6, plan())
    assert (result.offloads_done, result.loads_done) == (int32s([2]), int32s([1]))
    assert runner.snapshot().host_blocks == int32s([2])
    again = plan(extents=[(0, 9, 1, SAMPLE)], purged=[2, 3], offloads=[[(7, 3, tag(5))]])
    runner.execute(7, again)  # a purged block may be written at once
    copier.finish()
    assert runner.execute(8, plan()).offloads_done == int32s([3])
    snapshot = runner.snapshot()
    assert (snapshot.host_blocks, snapshot.host_tags) == (int32s([3]), tag(5))
    assert not runner._state.tickets._tags[[1, 2]].any(), "names are erased"


def test_a_host_block_may_be_read_by_two_tickets_at_once(runner: Runner, copier: SteppedCopier) -> None:
    runner.execute(5, plan(extents=[(0, 8, 1, SAMPLE)], loads=[[(1, 7)]], appends=[(0, 2, 8)]))
    assert copier.copy_block(Direction.LOAD)  # the first of the two
    assert runner.execute(6, plan(extents=[(0, 9, 1, SAMPLE)])).loads_done == int32s([1])
    with pytest.raises(PlanFault, match="offload target 0: block 1 is in an unfinished copy"):
        runner.execute(7, plan(offloads=[[(9, 1, TAG)]]))


def test_a_runner_without_a_host_pool_refuses_every_copy() -> None:
    for bad in (plan(offloads=[[(1, 1, TAG)]]), plan(loads=[[(1, 1)]])):
        with pytest.raises(PlanFault, match="there is no host block 1"):
            Runner(SpyBackend()).launch(1, bad)


@pytest.mark.parametrize("block", [5, 6, 21, 2**31 - 1])
def test_an_append_on_the_fast_path_is_checked_too(block: int) -> None:
    copier = SteppedCopier(SpyBackend().cache_regions, 8)

    class Gathers(SpyBackend):
        def change_slots(self, changes: object) -> None: ...

    runner = Runner(Gathers(), copier=copier)
    runner.execute(1, plan(admissions=[admission(0, [1] * 7, [1, 2])], extents=[(0, 0, 7, SAMPLE)]))
    runner.execute(2, plan(extents=[(0, 7, 1, SAMPLE)], offloads=[[(5, 3, TAG), (6, 4, TAG)]]))
    assert runner._state._continuation is not None
    following = plan(extents=[(0, 8, 1, SAMPLE)], appends=[(0, 2, block)])
    with pytest.raises(PlanFault, match=f"block {block}"):
        runner.execute(3, following)


def test_a_plan_that_only_adds_copies_to_the_last_one_is_not_taken_for_its_continuation() -> None:
    copier = SteppedCopier(SpyBackend().cache_regions, 8)

    class Gathers(SpyBackend):
        def change_slots(self, changes: object) -> None: ...

    runner = Runner(Gathers(), copier=copier)
    runner.execute(1, plan(admissions=[admission(0, [1] * 4, [1, 2])], extents=[(0, 0, 4, SAMPLE)]))
    for number in range(2, 5):
        runner.execute(number, plan(extents=[(0, 2 + number, 1, SAMPLE)], offloads=[[(10 + number, number, TAG)]]))
    copier.finish()
    assert np.frombuffer(runner.execute(5, plan()).offloads_done, "<i4").tolist() == [1, 2, 3]
