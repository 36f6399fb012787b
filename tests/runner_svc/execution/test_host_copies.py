"""The host tier of a runner: bytes go out and come back while steps compute, in sessions, faults and snapshots."""

from __future__ import annotations

import numpy as np
import pytest

from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.backends.poison import Poison
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from runner_svc.tiers.kv_copier import Direction
from runner_svc.tiers.thread_copier import CopyTrouble, ThreadCopier
from tests.support.host_world import NUM_HOST_BLOCKS, HostWorld, tag, threads
from tests.support.plans import SAMPLE, admission, int32s, ints, plan
from tests.support.stepped_copier import SteppedCopier

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
SLOW = CopyTrouble(delay_s=0.05, seed=3)


def expected(tokens: list[int], count: int) -> list[int]:
    return expected_tokens(tokens, count, eos_probability=0)


def offloaded(world: HostWorld) -> None:
    """Computes PROMPT in blocks 1 to 3, offloads the first two to host blocks 5 and 6, and reuses all of them."""
    assert world.compute(0, PROMPT, [1, 2, 3]) == expected(PROMPT, 1)[0]
    world.execute(releases=[0], offloads=[[(1, 5, tag(1)), (2, 6, tag(2))]])
    world.await_copies(offloads=[1])
    world.compute(1, [99] * 12, [3, 1, 2])
    world.execute(releases=[1])


@pytest.mark.parametrize("trouble", [None, SLOW], ids=["at once", "slowly"])
def test_blocks_that_went_out_and_came_back_hold_what_was_computed(trouble: CopyTrouble | None) -> None:
    world = HostWorld(threads(trouble))
    offloaded(world)
    world.execute(loads=[[(5, 7), (6, 8)]])
    world.await_copies(loads=[1])
    found = [world.compute(2, PROMPT, [7, 8, 9], num_computed=8)]
    found += world.decode(2, len(PROMPT) + 1, 3)
    assert found == expected(PROMPT, 4)


def test_a_wrong_order_is_a_wrong_token() -> None:
    """That the hash backend would notice copies of wrong blocks, or too early ones."""
    for loads, blocks in ([[(6, 7), (5, 8)]], [7, 8, 9]), ([[(5, 7)]], [7, 8, 9]):
        world = HostWorld()
        offloaded(world)
        world.execute(loads=loads)
        world.await_copies(loads=[1])
        assert world.compute(2, PROMPT, blocks, num_computed=8) != expected(PROMPT, 1)[0]
    held = HostWorld(lambda backend: SteppedCopier(backend.cache_regions, NUM_HOST_BLOCKS))
    held.compute(0, PROMPT, [1, 2, 3])
    held.launch(plan(releases=[0], offloads=[[(1, 5, tag(1)), (2, 6, tag(2))]]))
    held.backend.copy_blocks(np.array([3]), np.array([2]))  # which a plan may not do: see test_copy_faults
    assert isinstance(held.copier, SteppedCopier)
    held.copier.finish()
    held.execute()
    held.launch(plan(loads=[[(5, 7), (6, 8)]]))
    held.copier.finish()
    held.execute()
    assert held.compute(2, PROMPT, [7, 8, 9], num_computed=8) != expected(PROMPT, 1)[0]


def test_steps_compute_while_a_copy_is_in_flight() -> None:
    world = HostWorld(threads(CopyTrouble(delay_s=0.4, seed=1)))
    world.compute(0, PROMPT, [1, 2, 3])
    world.execute(offloads=[[(1, 1, tag(1))], [(2, 2, tag(2))]], extents=[(0, 9, 1, SAMPLE)])
    found = world.decode(0, 11, 2)
    assert world.offloads_done == []  # the steps did not wait
    assert found == expected(PROMPT, 4)[2:]
    world.await_copies(offloads=[1, 2])


def test_each_direction_is_in_order_and_does_not_wait_for_the_other() -> None:
    world = HostWorld(lambda backend: SteppedCopier(backend.cache_regions, NUM_HOST_BLOCKS))
    copier = world.copier
    assert isinstance(copier, SteppedCopier)
    held = world.launch(plan(offloads=[[(1, 1, tag(1))], [(2, 2, tag(2))]]))
    copier.copy_all(Direction.OFFLOAD)
    world.take(held.wait())
    held = world.launch(plan(offloads=[[(3, 3, tag(3))]], loads=[[(1, 4)], [(2, 5)]]))
    copier.copy_all(Direction.LOAD)
    world.take(held.wait())
    assert (world.offloads_done, world.loads_done) == ([1, 2], [1, 2])
    assert world.runner.snapshot().host_blocks == int32s([1, 2, 3])  # which waited for the third


# ------------------------------------------------------------------ plans without rows


def test_a_plan_without_rows_is_held_until_a_copy_is_done() -> None:
    world = HostWorld(lambda backend: SteppedCopier(backend.cache_regions, NUM_HOST_BLOCKS))
    copier = world.copier
    assert isinstance(copier, SteppedCopier)
    held = world.launch(plan(offloads=[[(1, 1, tag(1)), (2, 2, tag(2))], [(3, 3, tag(3))]]))
    assert not held.done() and held.is_held
    copier.copy_block(Direction.OFFLOAD)
    assert not held.done()
    copier.copy_block(Direction.OFFLOAD)
    assert held.done()
    result = held.wait()
    assert (ints(result.offloads_done), result.loads_done) == ([1], b"")
    again = world.launch(plan())
    assert not again.done()
    copier.copy_all(Direction.OFFLOAD)
    assert again.done() and ints(again.wait().offloads_done) == [2]
    last = world.launch(plan())  # none is left
    assert last.done() and not last.wait().offloads_done


def test_a_plan_without_rows_is_held_no_longer_than_until_the_next_one() -> None:
    world = HostWorld(lambda backend: SteppedCopier(backend.cache_regions, NUM_HOST_BLOCKS))
    held = world.launch(plan(offloads=[[(1, 1, tag(1))]]))
    assert not held.done()
    following = world.launch(plan())
    assert held.done() and not held.wait().offloads_done
    assert not following.done()


def test_a_plan_with_rows_is_never_held() -> None:
    world = HostWorld(lambda backend: SteppedCopier(backend.cache_regions, NUM_HOST_BLOCKS))
    rows = plan(admissions=[admission(0, PROMPT, [1, 2, 3])], extents=[(0, 0, 9, SAMPLE)], offloads=[[(9, 1, tag(1))]])
    assert world.launch(rows).done()


def test_of_a_lost_ticket_nobody_hears_and_what_it_wrote_does_not_count() -> None:
    world = HostWorld(threads(CopyTrouble(lost=1.0)))
    world.execute(offloads=[[(1, 1, tag(1))]])
    world.execute()  # not held: nothing is in flight
    assert world.offloads_done == []
    world.execute(offloads=[[(1, 1, tag(1))]])  # the blocks are free
    world.execute()
    assert not world.runner.snapshot().host_blocks
    with pytest.raises(PlanFault, match="load source 0: host block 1 holds nothing"):
        world.execute(loads=[[(1, 2)]])


# ------------------------------------------------------------------ sessions


def test_a_snapshot_waits_for_the_copies_and_returns_the_tags() -> None:
    world = HostWorld(threads(SLOW))
    world.compute(0, PROMPT, [1, 2, 3])
    world.execute(offloads=[[(1, 4, tag(1)), (2, 2, tag(2))], [(3, 6, tag(3))]], extents=[(0, 9, 1, SAMPLE)])
    snapshot = world.runner.snapshot()
    assert ints(snapshot.host_blocks) == [2, 4, 6]
    assert snapshot.host_tags == tag(2) + tag(1) + tag(3)
    assert len(snapshot.sequences) == 1
    world.await_copies(offloads=[1, 2])


@pytest.mark.parametrize("resume", [False, True])
def test_the_host_pool_outlives_a_session_with_the_same_secret(resume: bool) -> None:
    world = HostWorld(threads(SLOW))
    assert world.runner.naming_secret == b""
    world.compute(0, PROMPT, [1, 2, 3])
    world.execute(offloads=[[(1, 5, tag(1)), (2, 6, tag(2))]], extents=[(0, 9, 1, SAMPLE)])
    begin = world.runner.resume if resume else world.runner.reset
    begin(b"secret")  # which waits for the ticket
    assert world.runner.naming_secret == b"secret"
    snapshot = world.runner.snapshot()
    assert (ints(snapshot.host_blocks), len(snapshot.sequences)) == ([5, 6], int(resume))
    world.execute(loads=[[(5, 7), (6, 8)]])
    world.await_copies(loads=[1])  # counted from 1 again
    assert world.offloads_done == []  # that ticket was the former session's
    assert world.compute(2, PROMPT, [7, 8, 9], num_computed=8) == expected(PROMPT, 1)[0]


@pytest.mark.parametrize("secret", [b"", b"another"])
def test_another_secret_empties_the_host_pool(secret: bytes) -> None:
    world = HostWorld()
    offloaded(world)
    world.runner.resume(secret)
    assert (world.runner.naming_secret, world.runner.snapshot().host_blocks) == (b"", b"")
    with pytest.raises(PlanFault, match="load source 0: host block 5 holds nothing"):
        world.execute(loads=[[(5, 7)]])


def test_without_a_secret_nothing_outlives_a_session() -> None:
    world = HostWorld()
    world.runner.reset()
    world.execute(offloads=[[(1, 5, tag(1))]])
    world.await_copies(offloads=[1])
    world.runner.reset()
    assert not world.runner.snapshot().host_blocks


# ------------------------------------------------------------------ faults


def test_what_a_failed_session_left_unfinished_never_counts() -> None:
    backend = HashBackend(num_slots=3, block_size=4, num_blocks=12, context_length=64, poison=Poison(66, "error"))
    world = HostWorld(threads(CopyTrouble(delay_s=0.2, seed=5)), backend)
    world.compute(0, PROMPT, [1, 2, 3])
    world.execute(releases=[0], offloads=[[(1, 1, tag(1))]])
    world.await_copies(offloads=[1])
    poisoned = [admission(1, [66], [9])]
    with pytest.raises(PlanFault, match="poison"):
        world.execute(admissions=poisoned, extents=[(1, 0, 1, SAMPLE)], offloads=[[(2, 2, tag(2)), (3, 1, tag(3))]])
    with pytest.raises(PlanFault, match="after a fault"):
        world.runner.resume(b"secret")
    world.runner.reset(b"secret")
    # Host block 1 was being written again, so that what it had is lost as well.
    assert world.runner.snapshot().host_blocks == b""
    assert not world.copier.in_flight
    world.execute(offloads=[[(4, 3, tag(4))]])
    world.await_copies(offloads=[1])
    assert ints(world.runner.snapshot().host_blocks) == [3]


def test_a_copy_that_fails_is_a_fault_of_the_session_alone() -> None:
    world = HostWorld()
    assert isinstance(world.copier, ThreadCopier)
    copied = world.copier._streams[Direction.OFFLOAD]._copied
    world.copier._streams[Direction.OFFLOAD]._copied = lambda *ticket: 1 / 0  # type: ignore[assignment]
    with pytest.raises(PlanFault, match="failed in the backend: ZeroDivisionError"):
        world.execute(offloads=[[(1, 1, tag(1))]])
    with pytest.raises(PlanFault, match="copying KV blocks failed"):
        world.runner.snapshot()
    world.copier._streams[Direction.OFFLOAD]._copied = copied  # type: ignore[method-assign]
    world.runner.reset(b"secret")
    offloaded(world)
    assert ints(world.runner.snapshot().host_blocks) == [5, 6] and not world.runner.broken


def test_hello_describes_the_pool() -> None:
    world = HostWorld()
    hello = world.runner.hello()
    assert (hello.num_host_blocks, hello.block_bytes) == (NUM_HOST_BLOCKS, 4 * 8)
    assert (hello.load_block_ns, hello.offload_block_ns) == (0, 0)
    without = Runner(world.backend).hello()
    assert (without.num_host_blocks, without.block_bytes) == (0, 0)
    assert not Runner(world.backend).snapshot().host_blocks
