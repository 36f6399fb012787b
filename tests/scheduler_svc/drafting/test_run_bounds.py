"""What the engine plans while runs of drafted tokens are unanswered: starts, bounds, blocks. Results are handmade."""

from __future__ import annotations

from itertools import product

import pytest

from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.scheduler.scheduler_check import check_scheduler
from tests.support.by_hand import ByHand, Sent
from tests.support.plans import AWAIT
from tests.support.thoroughness import choice


def test_rows_behind_an_unanswered_run_have_no_start_whatever_they_draft() -> None:
    hand = ByHand(depth=3)
    request = hand.decoding([1] * 5, 60)
    hand.next = [3, 0, 2]
    for _ in range(3):
        hand.answer(hand.take())
    first, second, third = hand.take(), hand.take(), hand.take()
    assert [(sent.row.start, sent.row.count, sent.row.drafts) for sent in (first, second, third)] == [
        (-1, 4, 3), (-1, 1, 0), (-1, 3, 2)
    ]  # fmt: skip
    before = hand.tokens(request).copy()
    hand.answer(first, {0: [7, 8]})
    hand.answer(second, {0: [9]})
    hand.answer(third, {0: [10, 11, 12]})
    assert hand.tokens(request) == [*before, 7, 8, 9, 10, 11, 12]
    # Planned when the third was unanswered, when only those before it were answered, and when all were.
    assert [hand.take().row.start for _ in range(3)] == [-1, -1, hand.known(request) + 1]
    check_scheduler(hand.scheduler)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_after_the_last_run_begin_where_it_ended(depth: int) -> None:
    """The last run's counters are bounds: no plan may be derived from it, even long after it was answered."""
    hand = ByHand(depth=depth)
    request = hand.decoding([1] * 5, 60)
    run = hand.run()
    hand.wanted = 0
    hand.answer(run, {0: [1, 2]})
    for _ in range(9):
        sent = hand.take()
        assert sent.row.start in (-1, hand.known(request) - 1)
        hand.answer(sent)
    assert sent.row.start != -1
    check_scheduler(hand.scheduler)


@pytest.mark.parametrize(("wanted", "max_drafts"), [(0, 7), (5, 0)])
def test_without_runs_nothing_of_them_is_sent(wanted: int, max_drafts: int) -> None:
    hand = ByHand(wanted, max_drafts=max_drafts)
    hand.decoding([1] * 5, 30)
    for _ in range(6):
        sent = hand.take()
        assert not sent.plan.extent_drafts and sent.row.start >= 0
        hand.answer(sent)


def test_a_step_with_a_prompt_drafts_nothing() -> None:
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 60)
    run, behind = hand.run(), hand.take()
    hand.submit([2] * 9, 5)
    hand.answer(run, {0: [5, 6, 7, 8]})
    mixed = hand.take()
    assert not any(mixed.drafts)
    decode, prompt = mixed.rows
    assert (decode.slot, decode.start, decode.count) == (0, -1, 1)
    assert (prompt.start, prompt.count) == (0, 9)
    hand.answer(behind, {0: [9, 10]})
    hand.answer(mixed, {0: [11]})
    assert hand.tokens(request)[-7:] == [5, 6, 7, 8, 9, 10, 11]


def test_rows_that_may_not_draft_keep_their_starts_beside_a_run() -> None:
    hand = ByHand(depth=2)
    hand.decoding([1] * 5, 60)
    other = hand.decoding([2] * 6, 60, no_speculation=True)
    run = hand.run()
    assert [(row.slot, row.drafts) for row in run.rows] == [(0, 3), (1, 0)]
    assert run.rows[1].start >= 0
    hand.answer(run, {0: [3, 4], 1: [5]})
    assert hand.tokens(other)[-1] == 5


def test_the_choices_of_a_request_run_apart() -> None:
    hand = ByHand(depth=1)
    request = hand.decoding([2] * 5, 60, n=2)
    run = hand.run()
    before = [stream.tokens.copy() for stream in request.streams]
    hand.answer(run, {0: [4, 5, 6], 1: [7]})
    gained = [stream.tokens[len(old) :] for stream, old in zip(request.streams, before, strict=True)]
    assert sorted(gained) == [[4, 5, 6], [7]]
    check_scheduler(hand.scheduler)


# ------------------------------------------------------------------ bounds


@pytest.mark.parametrize(
    ("depth", "context", "kept"),
    choice(list(product((1, 2, 3), (14, 256), (1, 2, 8))), in_ci=[(1, 256, 8), (2, 14, 2), (3, 256, 1), (3, 14, 2)]),
)
def test_no_run_reaches_beyond_the_limit_and_a_row_at_its_bound_waits(depth: int, context: int, kept: int) -> None:
    """`max_tokens` or the context allows 14 tokens. `kept`: tokens that a run brings, at most."""
    hand = ByHand(7, depth=depth, context=context)
    request = hand.submit([1] * 5, 9)
    in_flight: list[Sent] = []
    for _ in range(40):
        hand.step()
        in_flight += [hand.take() for _ in range(hand.num_sent)]
        decoding = [sent for sent in in_flight if sent.row.count < 5 or sent.row.start]
        known = 5 + sum(len(stream.tokens) for stream in request.streams) + (len(decoding) < len(in_flight))
        assert known + sum(sent.row.count for sent in decoding) <= 14
        if in_flight:
            sent = in_flight.pop(0)
            hand.answer(sent, {0: [2] * (min(kept, sent.row.count) if sent in decoding else 1)})
    (stream,) = request.streams
    assert stream.tokens == [2] * 9 and stream.end is not None and stream.end.reason == FinishReason.LENGTH
    hand.stack.assert_clean()


def test_a_row_that_waits_at_its_bound_is_not_forgotten_by_steady_steps() -> None:
    """The other row decodes all the time, and nothing joins or leaves."""
    hand = ByHand(7, depth=2)
    bounded = hand.decoding([1] * 5, 9)
    steady = hand.decoding([2] * 5, 60, no_speculation=True)
    for _ in range(40):
        if bounded.streams[0].end is not None:
            break
        sent = hand.take()
        hand.answer(sent, {row.slot: [3] for row in sent.rows})
    assert len(hand.tokens(bounded)) == 9
    assert len(hand.tokens(steady)) < 20


def test_a_step_has_no_more_positions_than_the_runner_takes() -> None:
    hand = ByHand(7, slots=4, step_tokens=10)
    for number in range(3):
        hand.decoding([number] * 5, 60)
    for _ in range(6):
        sent = hand.take()
        assert sent.num_positions <= 10
        hand.answer(sent, {row.slot: [2] * row.count for row in sent.rows})


# ------------------------------------------------------------------ blocks


def with_cached_blocks(num_blocks: int) -> ByHand:
    """Returns an idle stack in which an earlier request has left two cached blocks."""
    hand = ByHand(num_blocks=num_blocks, depth=1)
    hand.decoding([9] * 8, 2)
    hand.finish()
    assert hand.scheduler.pool.num_cached == 2
    return hand


@pytest.mark.parametrize(("num_blocks", "drafts"), [(4, {0}), (5, {0, 4}), (6, {7})])
def test_drafts_take_blank_blocks_and_no_cached_one(num_blocks: int, drafts: set[int]) -> None:
    """The row has 7 tokens in 2 blocks of 4: its next position is 6, and the row behind it needs the last one."""
    hand = with_cached_blocks(num_blocks)
    request = hand.submit([1] * 5, 12)
    hand.answer(hand.take())
    while hand.known(request) < 7:
        hand.wanted = 7 * (hand.known(request) == 6)
        hand.answer(hand.take())
    sent = hand.take()
    assert sent.row.drafts in drafts
    assert hand.scheduler.pool.num_cached == 2
    check_scheduler(hand.scheduler)


def test_a_row_still_evicts_for_its_own_position() -> None:
    hand = with_cached_blocks(4)
    request = hand.decoding([1] * 5, 10)
    hand.wanted = 7
    hand.finish()
    assert len(hand.tokens(request)) == 10
    hand.stack.assert_clean()


@pytest.mark.parametrize("here", [True, False], ids=["here", "in the shared queue"])
def test_drafts_take_no_block_while_a_sequence_waits(here: bool) -> None:
    hand = ByHand(slots=1, depth=1)
    hand.decoding([1] * 5, 40)
    if here:
        hand.submit([2] * 5, 5)
    else:
        hand.stack.engine.ledger.count_waiting = lambda: 5
    hand.wanted = 7
    hand.answer(hand.take())
    for _ in range(8):
        sent = hand.take()
        assert len(sent.plan.append_slots) <= 4 and sent.row.count <= 4
        hand.answer(sent)


def test_drafts_preempt_nothing() -> None:
    """Three rows fill the pool: a row whose drafts have no room drafts less."""
    hand = ByHand(7, num_blocks=6, depth=2)
    for number in range(3):
        hand.decoding([number] * 5, 4)
    for _ in range(3):
        sent = hand.take()
        hand.answer(sent, {row.slot: [3] for row in sent.rows})
    assert hand.scheduler.preemptions == 0
    hand.finish()
    hand.stack.assert_clean()


def test_what_a_wrong_run_reserved_is_used_by_the_next() -> None:
    hand = ByHand(depth=1)
    hand.decoding([1] * 5, 40)
    run, blocks = hand.run(7), len(hand.scheduler.table.at(0).blocks)
    assert len(run.plan.append_slots) // 4 == blocks - 2 >= 1
    hand.answer(run)
    again = hand.take()
    assert again.row.drafts == 7
    assert len(again.plan.append_slots) // 4 == len(hand.scheduler.table.at(0).blocks) - blocks <= 1
    check_scheduler(hand.scheduler)


@pytest.mark.parametrize("max_drafts", [3, 7, 254])
def test_no_row_drafts_more_than_its_runner_can(max_drafts: int) -> None:
    hand = ByHand(max_drafts=max_drafts, num_blocks=512, context=2048, step_tokens=2048)
    request = hand.decoding([1] * 5, 1000)
    run = hand.run(2000)
    assert run.drafts == [max_drafts] and run.row.count == 1 + max_drafts
    hand.answer(run, {0: [2] * (1 + max_drafts)})
    assert hand.tokens(request)[-1 - max_drafts :] == [2] * (1 + max_drafts)


def test_a_runner_whose_drafts_no_plan_can_state_is_rejected() -> None:
    hand = ByHand(max_drafts=255)
    assert "lower its max_drafts" in hand.stack.runners.rejected[1]


@pytest.mark.parametrize(("num_blocks", "cached"), [(4, 0), (5, 1)])
def test_a_block_that_only_a_bound_needs_preempts_and_evicts_nothing(num_blocks: int, cached: int) -> None:
    """The rows in flight may end in the sequence's last block or at its end. It waits for a result."""
    hand = ByHand(num_blocks=num_blocks, depth=3)
    if cached:
        hand.decoding([9] * 4, 2)
        hand.finish()
    assert hand.scheduler.pool.num_cached == cached
    row, other = hand.submit([1] * 5, 10), hand.submit([2] * 5, 2)
    hand.next = [1]
    prompts, run, behind = hand.take(), hand.take(), hand.take()
    assert run.drafts == [1, 0] and behind.drafts == [0]
    assert hand.scheduler.table.planned[0] == hand.scheduler.table.capacity[0] == 8
    hand.answer(prompts)
    assert hand.num_sent == hand.scheduler.preemptions == 0 and hand.scheduler.pool.num_cached == cached
    hand.answer(run)
    assert hand.known(row) == 7 and len(hand.tokens(other)) == 2
    again = hand.take()
    assert again.row.start == 7 and hand.scheduler.preemptions == 0
    hand.answer(behind)
    hand.answer(again)
    hand.finish()
    assert len(hand.tokens(row)) == 10
    hand.stack.assert_clean()


def test_a_run_leaves_the_row_behind_it_a_position() -> None:
    """Without a blank block, rows take turns as without drafts: none waits for a result, and none is evicted early."""
    hand = ByHand(num_blocks=4, depth=2)
    hand.decoding([9] * 4, 2)
    hand.finish()
    row = hand.submit([1] * 5, 10)
    hand.wanted, seen = 7, []
    while not (row.streams and row.streams[0].end):
        sent = hand.take()
        seen.append(sent.row.drafts)
        assert hand.num_sent or hand.scheduler.table.known[0] == 15, "the row waits for a result"
        hand.answer(sent)
    assert max(seen) > 0
    hand.stack.assert_clean()


def test_constrained_rows_draft_nothing_and_keep_their_starts_beside_runs() -> None:
    hand = ByHand(7, depth=2)
    free = hand.decoding([1] * 5, 60)
    tied = hand.submit([2] * 5, 8, grammar=grammar_text("regex", "[ab]{8}"))
    seen = 0
    for _ in range(30):
        sent = hand.take()
        for row in sent.rows:
            if row.flags == AWAIT:
                assert row.start >= 0 and not row.drafts
                seen += any(sent.drafts)
        hand.answer(sent, {row.slot: [97] * (1 if row.flags == AWAIT else row.count) for row in sent.rows})
        if tied.streams and tied.streams[0].end is not None:
            break
    assert hand.tokens(tied) == [97] * 8 and seen > 2
    hand.finish()
    assert len(hand.tokens(free)) == 60
