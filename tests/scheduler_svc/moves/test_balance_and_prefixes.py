"""A fuller runner gives sequences away, and a prefix that one runner has is copied to another instead of computed."""

from __future__ import annotations

from roster_protos import engine_pb2
from scheduler_svc.moves.move_counts import Use
from scheduler_svc.moves.prefix_moves import LEAST_BLOCKS
from tests.support.in_process import Stack
from tests.support.moving_stack import add_runner, check, moving_stack, run

NUM_TOKENS = 120
PREFIX = list(range(100))


def running(stack: Stack) -> list[int]:
    return [scheduler.table.num_running for scheduler in stack.engine.pool.schedulers.values()]


def test_a_runner_that_joins_late_takes_its_share() -> None:
    stack = moving_stack("", num_blocks=512)
    for number in range(8):
        stack.submit([number, *range(30)], NUM_TOKENS)
    run(stack, 10)
    computed = stack.engine.pool.schedulers[1].prefill_tokens
    add_runner(stack, num_blocks=512)
    run(stack, 1)
    assert running(stack) == [8, 0]
    run(stack, 70)
    few, many = sorted(running(stack))
    assert many - few < 4, running(stack)
    moved = stack.engine.moves.counts.done[Use.BALANCE]
    assert 2 <= moved <= 4
    run(stack, 10)
    assert stack.engine.moves.counts.begun[Use.BALANCE] == moved, "sequences move to and fro"
    run(stack, 100)
    check(stack)
    assert sum(each.prefill_tokens for each in stack.engine.pool.schedulers.values()) == computed + moved


def test_a_runner_short_of_blocks_gives_a_sequence_away_before_it_preempts() -> None:
    stack = moving_stack("", num_blocks=72, num_slots=16)
    for number in range(3):
        stack.submit([number, *range(40)], NUM_TOKENS)
    run(stack, 5)
    add_runner(stack, num_blocks=256, num_slots=16)
    run(stack, 250)
    check(stack)
    assert stack.engine.moves.counts.done[Use.BALANCE] >= 1
    assert all(each.preemptions == 0 for each in stack.engine.pool.schedulers.values())


def with_a_busy_home() -> Stack:
    """Returns a stack in which one runner has PREFIX in its cache and computes, and the other has nothing to do."""
    stack = moving_stack("", "", num_slots=4, num_blocks=512)
    stack.submit(PREFIX, 2)
    run(stack, 10)
    home = next(s for s in stack.engine.pool.schedulers.values() if s.pool.num_cached)
    other = next(s for s in stack.engine.pool.schedulers.values() if s is not home)
    stack.submit([*PREFIX, 0], 300)
    run(stack, 3)
    assert home.table.num_running == 1 and not other.table.num_running
    return stack


def test_a_prefix_is_copied_where_its_home_is_busy() -> None:
    stack = with_a_busy_home()
    before = sum(scheduler.prefill_tokens for scheduler in stack.engine.pool.schedulers.values())
    for number in (7, 8):
        stack.submit([*PREFIX, 255, number], 5)
    run(stack, 30)
    counts = stack.engine.moves.counts
    assert counts.begun[Use.PREFIX] == 1, "two sequences with one prefix fetch it once"
    assert counts.done[Use.PREFIX] == 1 and counts.blocks == len(PREFIX) // 4
    computed = sum(scheduler.prefill_tokens for scheduler in stack.engine.pool.schedulers.values()) - before
    assert computed == 2 * 2
    run(stack, 320)
    check(stack)


def test_a_short_prefix_is_computed() -> None:
    stack = with_a_busy_home()
    stack.submit([*PREFIX[: 4 * (LEAST_BLOCKS - 1)], 255, 254], 5)
    run(stack, 30)
    assert not stack.engine.moves.counts.begun
    run(stack, 320)
    check(stack)


def test_a_sequence_does_not_wait_for_a_prefix_longer_than_computing_it_takes() -> None:
    stack = with_a_busy_home()
    assert stack.runners.moves is not None
    stack.runners.moves.stalled = True
    request = stack.submit([*PREFIX, 255], 5)
    run(stack, 100)
    assert not request.streams[0].tokens
    run(stack, 150)  # LONGEST_WAIT_S is over
    assert request.streams[0].end is not None
    stack.runners.moves.stalled = False
    run(stack, 320)
    check(stack)


def test_a_cancelled_sequence_and_a_lost_target_leave_nothing_behind() -> None:
    for event in ("cancel", "lose the target", "lose the donor"):
        stack = with_a_busy_home()
        assert stack.runners.moves is not None
        stack.runners.moves.stalled = True
        request = stack.submit([*PREFIX, 255], 5)
        run(stack, 3)
        assert stack.engine.moves.prefixes.num_waiting == 1
        (transfer,) = stack.engine.moves.transfers
        if event == "cancel":
            stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
            run(stack, 2)
            assert not stack.engine.moves.prefixes.num_waiting
            del stack.requests[request.handle]
        else:
            stack.runners.kill(transfer.target if event == "lose the target" else transfer.source)
        stack.runners.moves.stalled = False
        run(stack, 700)
        check(stack)
