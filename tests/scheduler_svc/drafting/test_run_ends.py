"""What the engine takes from runs of drafted tokens: ends within them, late and malformed results, KV, losses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.scheduler.scheduler_check import check_scheduler
from tests.support.by_hand import ByHand, Sent
from tests.support.in_process import Submitted
from tests.support.plans import ints
from tests.support.thoroughness import choice

STOP = 99
NOT_FINITE = plan_pb2.ROW_STATUS_NOT_FINITE


def sampling(**fields: object) -> plan_pb2.Sampling:
    return plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1, stop_ids=pack([STOP]), **fields)  # type: ignore[arg-type]


def reason_of(request: Submitted) -> FinishReason:
    end = request.streams[0].end
    assert end is not None
    return FinishReason(end.reason)


def attached(hand: ByHand, request: Submitted) -> engine_pb2.ChoiceRecord:
    submit = request.submit
    attach = engine_pb2.Attach(handle=70, request_id=submit.request_id, tenant=submit.tenant)
    hand.stack.front.put(b"another worker", attach=attach)
    hand.step()
    return hand.stack.others[-1].attached.choices[0]


# ------------------------------------------------------------------ ends within a run


@pytest.mark.parametrize("place", [0, 1, 3])
def test_nothing_behind_a_stop_token_within_a_run_reaches_anything(place: int) -> None:
    hand = ByHand(depth=2, retention_s=60, retention_requests=9)
    other = hand.decoding([2] * 5, 60)
    request = hand.decoding([1] * 5, 60, tenant="t", sampling=sampling(logprobs=1))
    run, draws = hand.run(), [20, 21, 22, 23]
    behind, before = hand.take(), len(hand.tokens(request))
    draws[place] = STOP
    hand.answer(run, {1: draws, 0: [24, 25]})
    hand.answer(behind, {1: [30, 31], 0: [26]})
    assert hand.tokens(request)[before:] == draws[: place + 1] and reason_of(request) is FinishReason.STOP
    assert hand.tokens(other)[-3:] == [24, 25, 26]
    assert hand.stack.engine.requests.ledger.account("t").sampled_tokens == before + place + 1
    end = request.streams[0].end
    assert end is not None and (end.drafted_tokens, end.accepted_tokens) == (3, min(3, place + 1))
    record = attached(hand, request)
    assert record.tokens == pack(hand.tokens(request)) and len(record.logprobs.values) == len(record.tokens)
    check_scheduler(hand.scheduler)


def test_a_run_that_holds_two_stop_tokens_ends_at_the_first() -> None:
    hand = ByHand(depth=1)
    request = hand.decoding([1] * 5, 60, sampling=sampling())
    hand.answer(hand.run(), {0: [STOP, 20, STOP]})
    assert hand.tokens(request)[-1] == STOP and hand.tokens(request).count(STOP) == 1


def test_a_stop_token_that_completes_the_limit_is_the_reason() -> None:
    hand = ByHand(depth=1)
    request = hand.decoding([1] * 5, 6, sampling=sampling())
    run = hand.run(7)
    rest = 6 - len(hand.tokens(request))
    assert run.row.count == rest
    hand.answer(run, {0: [*[20] * (rest - 1), STOP]})
    assert reason_of(request) is FinishReason.STOP and len(hand.tokens(request)) == 6
    hand.stack.assert_clean()


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_a_stop_string_within_a_run_cuts_tokens_and_log_probabilities(keep: int) -> None:
    """The front finds it in the run's tokens, when the next run is in flight."""
    hand = ByHand(depth=2, retention_s=60, retention_requests=9)
    request = hand.decoding([1] * 5, 60, tenant="t", sampling=sampling(logprobs=0))
    run = hand.run()
    behind, before = hand.take(), hand.tokens(request).copy()
    hand.answer(run, {0: [20, 21, 22, 23]})
    assert request.first_sequence_id is not None
    cut = engine_pb2.Cut(sequence_id=request.first_sequence_id, num_tokens=len(before) + keep, stop_string="x")
    hand.stack.front.put(cut=cut)
    hand.answer(behind, {0: [24, 25]})
    record = attached(hand, request)
    assert ints(record.tokens) == [*before, 20, 21, 22, 23][: len(before) + keep]
    assert len(record.logprobs.values) == len(record.tokens) and record.end.stop_string == "x"
    assert hand.stack.engine.requests.ledger.account("t").sampled_tokens == len(before) + keep
    hand.finish()
    hand.stack.assert_clean()


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
def test_a_request_that_leaves_within_a_run_gets_nothing_more(how: str) -> None:
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 60, timeout_ms=1000)
    run = hand.run()
    behind, before = hand.take(), hand.tokens(request).copy()
    hand.give(run, hand.result(run, {0: [20, 21]}))
    if how == "deadline":
        hand.stack.now_s = 2.0
    elif how == "cancel":
        hand.stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    else:
        hand.stack.front.put(disconnect=engine_pb2.Disconnect(handle=request.handle))
    hand.step()
    assert hand.tokens(request) in (before, [*before, 20, 21])
    seen = hand.tokens(request).copy()
    hand.answer(behind, {0: [22, 23]})
    assert hand.tokens(request) == seen
    assert reason_of(request) in (FinishReason.CANCELLED, FinishReason.DEADLINE)
    hand.finish()
    hand.stack.assert_clean()


def test_a_row_whose_first_position_is_not_finite_ends_its_sequence() -> None:
    """A second row is fine: a result without any finite row would drop the runner."""
    hand = ByHand(depth=2)
    other = hand.decoding([2] * 5, 60)
    request = hand.decoding([1] * 5, 60)
    run = hand.run()
    behind, before = hand.take(), hand.tokens(request).copy()
    hand.answer(run, {0: [20, 21]}, statuses={1: NOT_FINITE})
    hand.answer(behind, {0: [22]}, statuses={1: plan_pb2.ROW_STATUS_FAILED})
    assert hand.tokens(request) == before and reason_of(request) is FinishReason.ERROR
    assert hand.tokens(other)[-3:] == [20, 21, 22]
    check_scheduler(hand.scheduler)


def test_fewer_verified_drafts_than_planned_are_no_rejections() -> None:
    """The runner's drafter had one token only. Nothing of the bounds is left over."""
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 60)
    run = hand.run(5)
    hand.answer(run, {0: [20, 21]}, drafted=[1])
    assert hand.tokens(request)[-2:] == [20, 21]
    hand.wanted = 0
    for _ in range(3):
        sent = hand.take()
        hand.answer(sent)
    assert hand.scheduler.table.spread[0] == 0
    hand.finish()
    assert len(hand.tokens(request)) == 60


# ------------------------------------------------------------------ late results


@pytest.mark.parametrize("ends", [False, True])
def test_late_runs_of_a_preempted_row_bring_all_their_tokens_up_to_an_end(ends: bool) -> None:
    """Another sequence has the slot by then."""
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 60, sampling=sampling(logprobs=0))
    run = hand.run()
    behind, before = hand.take(), hand.tokens(request).copy()
    sequence = hand.scheduler.table.at(0)
    hand.preempt()
    newcomer = hand.submit([2] * 5, 5)
    hand.answer(run, {0: [20, STOP if ends else 21, 22]})
    assert hand.num_sent == ends, "it was admitted without its late tokens"
    hand.answer(behind, {0: [23, 24]})
    assert hand.tokens(request)[len(before) :] == ([20, STOP] if ends else [20, 21, 22, 23, 24])
    assert (sequence.drafted_tokens, sequence.accepted_tokens) == ((3, 2) if ends else (6, 3))
    newest = hand.take()
    admitted = [ints(admission.tokens) for admission in newest.plan.admissions]
    assert admitted == ([] if ends else [[1] * 5 + hand.tokens(request)]) + [[2] * 5]
    assert not ends or reason_of(request) is FinishReason.STOP
    hand.answer(newest, {row.slot: [7] for row in newest.rows})
    assert hand.tokens(newcomer) == [7]
    check_scheduler(hand.scheduler)


def test_a_late_run_that_reaches_the_limit_ends_there() -> None:
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 10)
    run, behind = hand.run(7), None
    hand.step()
    if hand.num_sent:
        behind = hand.take()
    rest = 10 - len(hand.tokens(request))
    hand.preempt()
    hand.answer(run, {0: [20] * min(rest, run.row.count)})
    if behind is not None:
        hand.answer(behind, {0: [21]})
    assert len(hand.tokens(request)) == 10 or request.streams[0].end is None
    hand.finish()
    assert len(hand.tokens(request)) == 10 and reason_of(request) is FinishReason.LENGTH
    hand.stack.assert_clean()


def test_tenants_are_charged_by_token_also_where_as_many_rows_are_dropped() -> None:
    """Two tokens in two rows, both of the first row."""
    hand = ByHand(depth=1)
    hand.decoding([1] * 5, 40, tenant="a")
    left = hand.decoding([2] * 5, 40, tenant="b")
    run, ledger = hand.run(3), hand.stack.engine.ledger
    before = [ledger.account(tenant).sampled_tokens for tenant in "ab"]
    hand.stack.front.put(cancel=engine_pb2.Cancel(handle=left.handle))
    hand.step()
    hand.answer(run, {0: [4, 5], 1: [6]})
    assert [ledger.account(tenant).sampled_tokens for tenant in "ab"] == [before[0] + 2, before[1]]


def test_a_result_that_comes_twice_counts_once() -> None:
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 60)
    run, before = hand.run(), len(hand.tokens(request))
    result = hand.result(run, {0: [20, 21, 22]})
    hand.give(run, result)
    hand.give(run, result)
    hand.step()
    assert hand.tokens(request)[before:] == [20, 21, 22]
    check_scheduler(hand.scheduler)


def test_an_attach_in_the_step_of_a_run_joins_without_a_gap() -> None:
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 60)
    run = hand.run()
    hand.give(run, hand.result(run, {0: [20, 21, 22]}))
    record = attached(hand, request)
    assert ints(record.tokens) == hand.tokens(request) and ints(record.tokens)[-3:] == [20, 21, 22]


def test_a_lost_runner_leaves_no_bounds_behind() -> None:
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 30)
    run = hand.run(7)
    hand.take()
    hand.answer(run, {0: [20, 21]})
    runner = hand.stack.runners.kill(1, Loss.LEFT)
    hand.step()
    hand.session = 2
    hand.stack.runners.connect(2, runner, former=1)
    hand.step()
    sent = hand.take()
    assert ints(sent.plan.admissions[0].tokens) == [1] * 5 + hand.tokens(request)
    hand.answer(sent)
    hand.finish()
    assert len(hand.tokens(request)) == 30
    hand.stack.assert_clean()


# ------------------------------------------------------------------ malformed results


def too_many_tokens(result: plan_pb2.Result) -> None:
    result.token_counts, result.tokens = bytes([5]), pack([1, 2, 3, 4, 5])


def more_tokens_than_verified(result: plan_pb2.Result) -> None:
    result.drafted = bytes([1])


def more_verified_than_planned(result: plan_pb2.Result) -> None:
    result.drafted = bytes([4])


def no_token(result: plan_pb2.Result) -> None:
    result.token_counts, result.tokens = bytes(1), b""


def no_drafted(result: plan_pb2.Result) -> None:
    result.drafted = b""


def long_drafted(result: plan_pb2.Result) -> None:
    result.drafted = bytes([3, 3])


def a_token_less(result: plan_pb2.Result) -> None:
    result.tokens = result.tokens[:-4]


def failed_with_tokens(result: plan_pb2.Result) -> None:
    result.statuses = bytes([NOT_FINITE])


@pytest.mark.parametrize(
    "spoil",
    [
        too_many_tokens,
        more_tokens_than_verified,
        more_verified_than_planned,
        no_token,
        no_drafted,
        long_drafted,
        a_token_less,
        failed_with_tokens,
    ],
)
def test_a_result_that_does_not_fit_its_run_ends_the_session(spoil: Callable[[plan_pb2.Result], None]) -> None:
    hand = ByHand(depth=2)
    request = hand.decoding([1] * 5, 30)
    run = hand.run()
    result = hand.result(run, {0: [20, 21, 22]})
    spoil(result)
    before = hand.tokens(request).copy()
    hand.stack.runners.garbled.add(1)
    hand.give(run, result)
    hand.step()
    assert 1 not in hand.stack.runners.runners and hand.tokens(request) == before


# ------------------------------------------------------------------ KV


@pytest.mark.parametrize(
    ("leaves", "kept"),
    choice(
        list(product(("cancelled", "preempted", "stopped"), (1, 2, 4, 5, 6))),
        in_ci=[("cancelled", 4), ("preempted", 4), ("stopped", 4), ("cancelled", 1), ("preempted", 5)],
    ),
)
def test_blocks_are_cached_only_below_the_last_confirmed_token(leaves: str, kept: int) -> None:
    """The run computes 8 positions from the seventh token's on; those of its last kept token and of what was rejected
    are none that another request may hit."""
    hand = ByHand(depth=1)
    request = hand.decoding([1] * 5, 40, sampling=sampling())
    hand.answer(hand.take())
    assert hand.known(request) == 7
    hand.wanted = 7
    hand.answer(hand.take())
    run, sequence = hand.take(), hand.scheduler.table.at(0)
    draws = [20] * kept
    if leaves == "stopped":
        draws = [*draws[:-1], STOP, 21, 22][: run.row.count]
    hand.answer(run, {0: draws})
    if leaves == "cancelled":
        hand.stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
        hand.step()
    elif leaves == "preempted":
        hand.preempt()
    num_tokens = hand.known(request)
    assert num_tokens == 8 + kept
    names = hand.scheduler.prefix._names(sequence, num_tokens // 4)
    assert hand.scheduler.pool.num_ready(names) == (num_tokens - 1) // 4


def test_a_run_in_flight_confirms_no_block_that_others_wait_for() -> None:
    """After a flush, rows that decode are below what counts as announced; a newcomer's blocks are PENDING meanwhile."""
    hand = ByHand(depth=2)
    hand.decoding([1] * 5, 60)
    run, behind = hand.run(7), hand.take()
    hand.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=5))
    hand.submit([3] * 20, 5)
    hand.answer(run, {0: [20] * run.row.count})
    prompt = hand.take()
    assert hand.scheduler.pool.num_pending == 5
    hand.answer(behind, {0: [20] * behind.row.count})
    assert hand.scheduler.pool.num_pending == 5
    hand.answer(prompt, {row.slot: [7] for row in prompt.rows})
    assert hand.scheduler.pool.num_pending == 0
    check_scheduler(hand.scheduler)


# ------------------------------------------------------------------ the token log


def test_the_log_is_whole_wherever_runs_meet_the_end_of_the_recent_results() -> None:
    """Recent tokens are copied to the logs every 64 results. Slots gain 1 to 8 tokens each, and are read between."""
    rng = np.random.default_rng(7)
    hand = ByHand(7, slots=3, depth=1, num_blocks=512, context=2048, step_tokens=64)
    requests = [hand.decoding([number] * 5, 900) for number in range(3)]
    sent: Sent
    for turn in range(150):
        sent = hand.take()
        draws = {row.slot: rng.integers(0, 250, rng.integers(1, row.count + 1)).tolist() for row in sent.rows}
        hand.answer(sent, draws)
        if turn % 7 == 0:
            hand.scheduler.settle(turn % 3)
    for request in requests:
        (sequence,) = hand.stack.engine.requests.book.by_handle(request.handle).sequences  # type: ignore[union-attr]
        assert list(sequence.tokens)[5:] == hand.tokens(request)
