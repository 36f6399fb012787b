"""Runners of different sizes: each request runs where it fits, waits for a bounded time, or ends with the reason.

    ROSTER_TEST_WALKS=5000 pytest --timeout=0 tests/scheduler_svc/runners/test_unlike_pools.py -k walks

runs many walks; `ROSTER_TEST_FIRST_WALK=SEED ROSTER_TEST_WALKS=1` repeats one.
"""

from __future__ import annotations

import os
from collections import Counter

import grpc
import pytest

from roster_protos import engine_pb2, plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import expected_tokens
from scheduler_svc.constrained.process.compiler import grammar_text
from scheduler_svc.link.runner_events import Joined, Loss
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from tests.support.constraints import allowed_after
from tests.support.in_process import Submitted
from tests.support.lockstep import advance, advance_until_idle
from tests.support.policies import policy_named
from tests.support.thoroughness import count
from tests.support.unlike_pools import MODEL, JudgedStack, PoolWalk, pool_backend

NUM_WALKS = int(os.environ.get("ROSTER_TEST_WALKS", "0")) or count(150, in_ci=10)
FIRST_WALK = int(os.environ.get("ROSTER_TEST_FIRST_WALK", "1"))
SMALL, LARGE = 8, 40
"""Numbers of blocks of 4 tokens, for sequences of 33 and of 161 tokens."""
NO_EOS = 0.0
NO_RUNNER_S = 5.0
LETTERS = ("regex", "[a-d]{90,200}")


def stack_of(*num_blocks: int, slots: int = 2, **settings: object) -> JudgedStack:
    stack = JudgedStack(no_runner_s=NO_RUNNER_S, **settings)
    for blocks in num_blocks:
        add(stack, blocks, slots)
    stack.step()
    return stack


def add(stack: JudgedStack, num_blocks: int, slots: int = 2, context_length: int = 256) -> int:
    return stack.add_runner(pool_backend(num_blocks, slots, context_length, eos_probability=NO_EOS))


def finish(stack: JudgedStack, *requests: Submitted) -> None:
    """Runs until all requests have ended, and asserts that each got the tokens that it gets alone."""
    advance_until_idle(stack)
    for request in requests:
        for index in range(request.submit.n):
            assert request.streams[index].tokens == request.expected(index, NO_EOS)
            assert request.streams[index].end is not None
    stack.assert_clean()


def running(stack: JudgedStack, session: int) -> list[str]:
    table = stack.engine.pool.schedulers[session].table
    return sorted(sequence.request.request_id for sequence in table.running())


def end_of(request: Submitted, index: int = 0) -> engine_pb2.End:
    end = request.streams[index].end
    assert end is not None
    return end


def test_a_long_request_waits_for_the_larger_runner_beside_an_idle_smaller_one() -> None:
    stack = stack_of(SMALL, LARGE, slots=1)
    small, large = stack.runners.runners
    first, second = stack.submit([1] * 40, 60), stack.submit([2] * 40, 60)
    advance(stack, 20)
    assert running(stack, large) == ["r1"] and running(stack, small) == []
    assert stack.engine.pool.schedulers[small].last_plan == 0
    finish(stack, first, second)


def test_a_head_that_waits_for_the_larger_runner_holds_up_nothing_that_the_smaller_one_can_take() -> None:
    stack = stack_of(SMALL, LARGE, slots=1)
    small, large = stack.runners.runners
    long = [stack.submit([number] * 40, 60) for number in range(3)]
    advance(stack, 3)
    short = [stack.submit([number], 10) for number in range(3)]
    advance(stack, 3)
    assert running(stack, large) == ["r1"] and running(stack, small) == ["r4"]
    finish(stack, *long, *short)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_the_larger_runner_is_kept_for_the_first_that_needs_it(policy: str) -> None:
    """More short requests arrive than both runners can serve: the long one would never find the larger runner empty."""
    stack = stack_of(SMALL, LARGE, slots=4, policy=policy)
    large = list(stack.runners.runners)[1]
    short = [stack.submit([number], 5 + 7 * number % 17) for number in range(16)]  # they end one after the other
    advance(stack, 3)
    assert len(running(stack, large)) == 4
    long = stack.submit([9] * 150, 10, tenant="other" if policy == "fair" else "")
    while long.submit.request_id not in running(stack, large):
        short.append(stack.submit([len(short)], 5 + 7 * len(short) % 17))
        advance(stack)
        assert len(short) < 150, "it starves"
    finish(stack, long, *short)


def test_sequences_get_the_larger_runner_in_order_of_rank() -> None:
    stack = stack_of(SMALL, LARGE, slots=1, policy="priority")
    large = list(stack.runners.runners)[1]
    stack.submit([1] * 40, 40)
    advance(stack, 3)
    low, high = stack.submit([2] * 40, 60, priority=-5), stack.submit([3] * 40, 60, priority=5)
    advance(stack, 60)
    assert running(stack, large) == [high.submit.request_id]
    finish(stack, low, high)


def test_a_short_request_goes_to_the_smaller_of_two_idle_runners() -> None:
    stack = stack_of(LARGE, SMALL)
    large, small = stack.runners.runners
    request = stack.submit([1], 20)
    advance(stack, 3)
    assert running(stack, small) == ["r1"] and running(stack, large) == []
    finish(stack, request)


@pytest.mark.parametrize("others", [[], [SMALL]])
@pytest.mark.parametrize("how", ["kill", "leave"])
def test_the_long_sequence_of_a_runner_that_a_smaller_one_replaces_ends_with_the_reason(
    others: list[int], how: str
) -> None:
    stack = stack_of(LARGE, *others)
    large = next(iter(stack.runners.runners))
    long = stack.submit([1] * 20, 100, n=2)
    advance(stack, 25)
    replace(stack, large, how, SMALL)
    short = stack.submit([2], 20)
    advance(stack, 40)
    assert not any(stream.end for stream in long.streams) and short.streams[0].end is not None
    stack.now_s += NO_RUNNER_S
    advance(stack, 2)
    for index in range(2):
        end, tokens = end_of(long, index), long.streams[index].tokens
        assert end.reason == FinishReason.UNAVAILABLE and "hold its 120 tokens" in end.message
        assert 0 < len(tokens) < 100 and tokens == long.expected(index, NO_EOS)[: len(tokens)]
    finish(stack, short)


def replace(stack: JudgedStack, session: int, how: str, num_blocks: int) -> int:
    (stack.runners.kill if how == "kill" else stack.runners.leave)(session)
    advance(stack, 3)
    assert session not in stack.engine.pool.schedulers
    return add(stack, num_blocks)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"grammar": True}])
@pytest.mark.parametrize("how", ["kill", "leave", "swap", "scheduler"])
def test_the_long_sequence_goes_on_when_a_runner_comes_that_holds_it(how: str, fields: dict[str, int]) -> None:
    stack = stack_of(LARGE)
    sampling = plan_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1)
    for name in fields.keys() - {"grammar"}:
        setattr(sampling, name, 1)
    grammar = ""
    if "grammar" in fields:
        grammar, sampling.stop_ids = grammar_text(*LETTERS), pack([IM_END_ID])
    long = stack.submit([1] * 20, 60, n=2, sampling=sampling, grammar=grammar)
    if grammar:
        long.allowed = allowed_after(MODEL, *LETTERS, stop_ids=[IM_END_ID])
    advance(stack, 8)
    if how == "scheduler":  # its successor finds the long sequences on a runner that can't hold their maximum length
        next(iter(stack.runners.runners.values()))._backend.num_blocks = 19  # type: ignore[misc]
        stack.restart_scheduler()
        (scheduler,) = stack.engine.pool.schedulers.values()
        assert scheduler.most_tokens == 77 and not scheduler.table.num_running
    else:
        replace(stack, next(iter(stack.runners.runners)), how if how != "swap" else "kill", SMALL)
    short = stack.submit([2], 20)
    advance(stack, 30)
    if how == "swap":
        stack.engine.change_policy(policy_named("fair"))
        advance(stack, 2)
    assert not any(stream.end for stream in long.streams)
    stack.now_s += NO_RUNNER_S / 2
    advance(stack, 3)
    add(stack, LARGE)
    finish(stack, long, short)


def test_time_goes_on_while_runners_come_and_go_that_give_no_token() -> None:
    stack = stack_of(LARGE, SMALL)
    large = next(iter(stack.runners.runners))
    long = stack.submit([1] * 20, 100)
    advance(stack, 10)
    for _ in range(6):
        stack.runners.kill(large, Loss.LEFT)
        stack.step()
        stack.now_s += NO_RUNNER_S / 4
        stack.step()
        if long.streams[0].end is not None:
            break
        large = add(stack, LARGE)
        stack.step()
    assert end_of(long).reason == FinishReason.UNAVAILABLE


def test_a_request_whose_only_runner_is_closed_waits_as_long_as_that_computes() -> None:
    stack = stack_of(SMALL, LARGE)
    small, large = stack.runners.runners
    running_there = stack.submit([3] * 40, 60)
    advance(stack, 3)
    stack.engine.placement.close(large)
    long, short = stack.submit([1] * 20, 60), stack.submit([2], 10)
    advance(stack, 5)
    assert running(stack, small) == ["r3"] and running(stack, large) == ["r1"]
    for _ in range(3):
        stack.now_s += NO_RUNNER_S + 1
        advance(stack)
    assert not long.streams[0].end
    stack.engine.placement.open(large)
    finish(stack, running_there, long, short)


def test_a_request_whose_only_runner_leaves_waits_for_another_and_holds_up_nothing() -> None:
    stack = stack_of(SMALL, LARGE)
    small, large = stack.runners.runners
    running_there = stack.submit([3] * 40, 60)
    advance(stack, 3)
    stack.step()
    stack.runners.leave(large)
    long, short = stack.submit([1] * 20, 60), stack.submit([2], 10)
    stack.whole_turn(small)
    stack.whole_turn(small)
    assert running(stack, small) == ["r3"] and running(stack, large) == ["r1"]
    advance(stack, 3)
    assert list(stack.engine.pool.schedulers) == [small] and len(stack.engine.placement.misfits) == 2
    add(stack, LARGE)
    finish(stack, running_there, long, short)


def test_a_closed_runner_that_does_nothing_is_not_waited_for_longer() -> None:
    stack = stack_of(SMALL, LARGE)
    stack.engine.placement.close(list(stack.runners.runners)[1])
    long = stack.submit([1] * 20, 60)
    advance(stack, 5)
    stack.now_s += NO_RUNNER_S + 1
    advance(stack, 2)
    assert end_of(long).reason == FinishReason.UNAVAILABLE


def test_a_request_that_no_runner_holds_is_refused_and_the_largest_says_what_is_announced() -> None:
    """Each runner has its own context length; a large pool does not extend it."""
    stack = stack_of(SMALL)
    assert stack.model is not None and stack.model.pool_tokens == 33
    add(stack, LARGE, context_length=100)
    stack.step()
    too_long, fits = stack.submit([1] * 41, 60), stack.submit([1] * 40, 60)
    finish(stack, fits)
    assert too_long.refused is not None and too_long.refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert too_long.refused.field == "stop.max_tokens" and "100 tokens" in too_long.refused.message
    assert stack.model.pool_tokens == 100


def test_the_longest_context_is_announced() -> None:
    stack = JudgedStack(no_runner_s=NO_RUNNER_S)
    add(stack, LARGE, context_length=64)
    stack.step()
    large = add(stack, LARGE, context_length=128)
    stack.step()
    assert stack.model is not None and (stack.model.model.context_length, stack.model.pool_tokens) == (128, 128)
    stack.runners.kill(large)
    stack.step()
    assert (stack.model.model.context_length, stack.model.pool_tokens) == (128, 64)


def test_a_new_scheduler_that_meets_the_smaller_runner_first_knows_the_longest_context() -> None:
    """Otherwise it would cut the same request shorter than its predecessor did."""
    stack = JudgedStack(no_runner_s=NO_RUNNER_S)
    add(stack, LARGE, context_length=64)
    (joined,) = stack.runners.events
    assert isinstance(joined, Joined)
    joined.hello.longest_context = 128
    stack.step()
    assert stack.model is not None and (stack.model.model.context_length, stack.model.pool_tokens) == (128, 64)


@pytest.mark.parametrize("resent", [False, True])
def test_what_was_begun_and_is_sent_to_a_new_scheduler_waits_for_a_runner_that_holds_it(resent: bool) -> None:
    stack = stack_of(SMALL)
    expected = expected_tokens([1] * 20, 60, eos_probability=NO_EOS)
    long = stack.submit([1] * 20, 60, received=pack(expected[:7]) if resent else b"")
    short = stack.submit([2], 10)
    advance(stack, 20)
    if not resent:
        assert long.refused is not None and long.refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        return
    assert long.refused is None and end_of(short) and not long.streams[0].tokens
    add(stack, LARGE)
    advance_until_idle(stack)
    assert long.streams[0].tokens == expected[7:] and end_of(long).reason == FinishReason.LENGTH
    stack.assert_clean()


@pytest.mark.parametrize("gone", [False, True])
def test_a_deadline_is_judged_by_the_runner_that_the_request_gets(gone: bool) -> None:
    """The smaller runner is idle, however many requests wait for the larger one, connected or gone."""
    stack = stack_of(SMALL, LARGE, slots=1)
    large = list(stack.runners.runners)[1]
    long = [stack.submit([number] * 40, 8) for number in range(30)]
    advance(stack, 120, turn_s=0.05)
    assert stack.engine.requests.rate.known and len(stack.engine.requests.queue) > 10
    if gone:
        stack.runners.kill(large)
        advance(stack, 2)
    late, short = stack.submit([1] * 40, 8, timeout_ms=500), stack.submit([2], 5, timeout_ms=500)
    advance(stack, 8, turn_s=0.05)
    assert short.refused is None and end_of(short).reason == FinishReason.LENGTH
    assert late.refused is not None
    if gone:
        add(stack, LARGE, slots=1)
    finish(stack, *long, short)


@pytest.mark.parametrize("other", ["small", "closed", "leaving"])
def test_free_slots_that_a_request_can_not_have_do_not_shorten_its_wait(other: str) -> None:
    stack = stack_of(SMALL if other == "small" else LARGE - 1, LARGE, slots=1)
    idle, large = stack.runners.runners
    first, second = (stack.submit([number] * 40, 120) for number in range(2))
    if other == "closed":
        stack.engine.placement.close(idle)
    stack.engine.pool.schedulers[idle].leaving = other == "leaving"
    advance(stack, 150, turn_s=0.05)
    assert running(stack, large) == ["r2"] and running(stack, idle) == [] and not stack.engine.requests.queue
    late = stack.submit([3] * 40, 120, timeout_ms=1_000)
    stack.step()
    assert late.refused is not None and "longer than its deadline" in late.refused.message
    finish(stack, first, second)


def test_those_that_smaller_runners_serve_too_count_partly() -> None:
    """The larger runner serves half of the short requests ahead of the long one."""
    stack = stack_of(SMALL, LARGE, slots=1)
    short = [stack.submit([number], 20) for number in range(70)]
    advance(stack, 300, turn_s=0.05)
    waiting = len(stack.engine.requests.queue)
    assert waiting > 30
    long = stack.submit([1] * 40, 20, timeout_ms=700 * waiting)  # each runner serves one of the short ones a second
    stack.step()
    assert long.refused is None
    advance(stack, 20 * waiting, turn_s=0.05)
    assert end_of(long).reason == FinishReason.LENGTH
    finish(stack, *short, long)


def test_a_request_without_max_tokens_gets_what_nearly_equal_runners_hold() -> None:
    """Runners of one kind differ by a few blocks; the request must not be bound to the one that has more."""
    stack = stack_of(LARGE, LARGE - 3, SMALL)
    assert stack.model is not None and (stack.model.pool_tokens, stack.model.usual_tokens) == (161, 149)
    stack.runners.kill(list(stack.runners.runners)[1])
    stack.step()
    assert (stack.model.pool_tokens, stack.model.usual_tokens) == (161, 161)


@pytest.mark.parametrize(("size", "waits"), [(LARGE - 3, False), (24, True)])
def test_a_request_without_max_tokens_makes_do_with_a_smaller_runner(size: int, waits: bool) -> None:
    """At once if that runner is nearly as large; otherwise if no other has joined in time."""
    stack = stack_of(LARGE)
    open_ended = stack.submit([1] * 20, 141, open_ended=True, n=2)
    advance(stack, 10)
    replace(stack, next(iter(stack.runners.runners)), "kill", size)
    advance(stack, 10)
    assert all(len(stream.tokens) > 10 for stream in open_ended.streams) == (not waits)
    stack.now_s += NO_RUNNER_S + 1
    advance_until_idle(stack)
    for index, stream in enumerate(open_ended.streams):
        assert end_of(open_ended, index).reason == FinishReason.LENGTH
        assert stream.tokens == open_ended.expected(index, NO_EOS)[: size * 4 + 1 - 20]
    stack.assert_clean()


def test_a_request_without_max_tokens_that_has_outgrown_all_runners_ends_with_the_reason() -> None:
    stack = stack_of(LARGE)
    open_ended = stack.submit([1] * 20, 141, open_ended=True)
    advance(stack, 40)
    replace(stack, next(iter(stack.runners.runners)), "kill", SMALL)
    advance(stack, 3)
    stack.now_s += NO_RUNNER_S + 1
    advance_until_idle(stack)
    assert end_of(open_ended).reason == FinishReason.UNAVAILABLE


@pytest.mark.parametrize("first", [True, False])
def test_nothing_is_preempted_for_a_sequence_that_the_runner_can_not_hold(first: bool) -> None:
    """Also if it is behind a sequence that makes room for itself by preemption."""
    stack = stack_of(LARGE, slots=1, policy="priority", policy_parameters={"preempt": True})
    long = stack.submit([1] * 20, 100, priority=7)
    advance(stack, 5)
    (large,) = stack.runners.runners
    small = add(stack, SMALL)
    low = [stack.submit([number], 25) for number in range(2)]
    advance(stack, 3)
    assert running(stack, large) == ["r1"] and running(stack, small) == ["r2", "r3"]
    stack.runners.kill(large)
    scheduler = stack.engine.pool.schedulers[small]
    if first:
        advance(stack, 3)
        assert scheduler.preemptions == 0 and len(stack.engine.placement.misfits) == 1
    high = stack.submit([3], 25, priority=5 if first else 9)
    advance(stack, 3)
    assert scheduler.preemptions == 1 and running(stack, small) == ["r2", "r4"]
    stack.now_s += NO_RUNNER_S + 1
    advance(stack, 40)
    stack.now_s += NO_RUNNER_S + 1
    finish(stack, *low, high)
    assert end_of(long).reason == FinishReason.UNAVAILABLE


# ---------------------------------------------------------------------- walks


def test_walks() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(FIRST_WALK, FIRST_WALK + NUM_WALKS):
        try:
            outcomes += PoolWalk(seed).go().outcomes
        except Exception as error:
            raise AssertionError(f"walk {seed}: {error!r}") from error
    assert NUM_WALKS < 10 or all(outcomes[name] for name in ("whole", "UNAVAILABLE", "INVALID_ARGUMENT")), outcomes
