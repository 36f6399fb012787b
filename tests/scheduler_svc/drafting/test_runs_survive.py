"""Sequences whose runs of drafted tokens are in flight when something happens to their scheduler, runner or slot."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from runner_svc.interface.step import StepBatch
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from tests.support.drafters import LateHash, drafting_backend
from tests.support.fake_moves import FakeMoves
from tests.support.in_process import Stack, Submitted
from tests.support.lockstep import advance, advance_until_idle
from tests.support.plans import ints
from tests.support.policies import policy_named
from tests.support.scripted_drafts import Always
from tests.support.thoroughness import choice

SIZES = {
    "num_slots": 4, "block_size": 4, "num_blocks": 64, "max_step_tokens": 40, "context_length": 256,
    "eos_probability": 0.0,
}  # fmt: skip
WRONG = choice([0.5, 0.0, 1.0], in_ci=[0.5])
"""Probability that a draft is wrong; at 1 all that a run computes beyond its first position is wrong."""


def backend(wrong: float, kind: type[HashBackend] = LateHash) -> HashBackend:
    return drafting_backend(kind, random.Random(5), wrong=wrong, lies=False, max_drafts=7, **SIZES)


def stack_of(wrong: float, runners: int = 1, *, moves: bool = False, host_blocks: int = 0, **settings: object) -> Stack:
    """Returns a stack in which every row drafts as much as it may. `moves`: whether runners take part in them."""
    stack = Stack(**{"depth": 3, "prefix_sharing": True, **settings})
    stack.drafts = Always(7)
    if moves:
        stack.runners.moves = FakeMoves(stack.runners.runners)
    for _ in range(runners):
        stack.add_runner(backend(wrong), host_blocks)
    stack.step()
    return stack


def assert_whole(*requests: Submitted) -> None:
    for request in requests:
        assert request.refused is None
        for index, stream in enumerate(request.streams):
            assert stream.end is not None and stream.end.reason == FinishReason.LENGTH
            assert stream.tokens == request.expected(index, 0.0)


def taken_over(stack: Stack) -> None:
    stack.restart_scheduler()


def preempted(stack: Stack) -> None:
    for scheduler in stack.engine.pool.schedulers.values():
        for sequence in scheduler.table.running():
            scheduler.departures.preempt(sequence, stack.engine.requests.queue)


def drained(stack: Stack) -> None:
    stack.add_runner(backend(0.5))
    stack.runners.leave(min(stack.runners.runners))


def moved(stack: Stack) -> None:
    drained(stack)
    stack.step()
    stack.step()
    assert any(move.sequence.stale for move in stack.engine.moves.sequences), "none has left with runs in flight"


def swapped_out(stack: Stack) -> None:
    for scheduler in stack.engine.pool.schedulers.values():
        assert scheduler.swapping is not None
        for sequence in scheduler.table.running():
            scheduler.swapping._swap(sequence, stack.engine.requests.queue)
            assert sequence.stale and 0 < sequence.swapped < len(sequence.tokens)


def lost(stack: Stack) -> None:
    stack.runners.kill(min(stack.runners.runners), Loss.LEFT)
    stack.add_runner(backend(0.5))


def silent(stack: Stack) -> None:
    """The same runner comes back, with what it holds."""
    session = min(stack.runners.runners)
    stack.runners.connect(90, stack.runners.kill(session, Loss.LEFT), former=session)


def swapped(stack: Stack) -> None:
    stack.engine.change_policy(policy_named("orca"))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("happens", [taken_over, preempted, drained, moved, swapped_out, lost, silent, swapped])
def test_the_streams_and_the_cached_blocks_are_right_afterwards(happens: Callable[[Stack], None], wrong: float) -> None:
    """Later requests begin with the text so far, and hit the blocks that the runs have filled, and no others."""
    for turns in choice(range(2, 6), in_ci=[4]):
        stack = stack_of(wrong, moves=happens is moved, host_blocks=64 * (happens is swapped_out))
        prompt = [turns, 1, 2, 3, 4, 5]
        first = stack.submit(prompt, 60)
        twins = stack.submit(prompt, 40, n=2, seed=3, sampling=sampling(temperature=1.0))
        advance(stack, turns)
        happens(stack)
        for _ in range(3):
            advance(stack, 3)
            text = prompt + first.streams[0].tokens
            later = [stack.submit(text[: len(text) - cut], 9) for cut in range(2)]
            advance(stack, 2)
        advance_until_idle(stack)
        assert_whole(first, twins, *later)
        stack.assert_clean()


def sampling(**fields: Any) -> plan_pb2.Sampling:
    return plan_pb2.Sampling(**{"temperature": 0, "top_p": 1, "repetition_penalty": 1, **fields})


@pytest.mark.parametrize("wrong", choice([0.5, 0.0, 1.0], in_ci=[0.5, 1.0]))
def test_a_text_whose_runs_were_rejected_is_hit_where_it_is_right(wrong: float) -> None:
    stack = stack_of(wrong)
    first = stack.submit([1, 2, 3, 4, 5, 6], 50)
    advance_until_idle(stack)
    text = [1, 2, 3, 4, 5, 6, *first.streams[0].tokens]
    later = [stack.submit([*text[:length], 250], 12) for length in range(7, 57, 3)]
    advance_until_idle(stack)
    assert_whole(first, *later)
    (scheduler,) = stack.engine.pool.schedulers.values()
    assert scheduler.cached_tokens >= sum((min(length, 55) // 4) * 4 for length in range(7, 57, 3))


def test_a_snapshot_after_a_run_has_the_counter_and_not_its_bound() -> None:
    """Nothing of it is computed again, and what it computed beyond its first wrong draft counts as nothing."""
    stack = stack_of(1.0)
    request = stack.submit([1, 2, 3, 4, 5, 6], 60)
    advance(stack, 6)
    runner = stack.runners.runners[1]
    stack.runners.finish(1)
    (resident,) = runner.snapshot().sequences
    tokens = ints(resident.tokens)
    assert tokens == [1, 2, 3, 4, 5, 6, *request.expected(0, 0.0)][: len(tokens)]
    assert resident.computed == len(tokens) - 1 < 4 * len(ints(resident.blocks)) - 4
    stack.restart_scheduler()
    advance_until_idle(stack)
    assert_whole(request)
    (scheduler,) = stack.engine.pool.schedulers.values()
    assert scheduler.prefill_tokens == 0 and stack.engine.requests.totals.requests == 0


class LosesPrecision(LateHash):
    """In sequences with a prompt of three tokens, the logits of tokens from the fourteenth on are not finite."""

    def _finite(self, batch: StepBatch, rows: Any, positions: Any) -> NDArray[np.bool_]:
        lengths = np.array([batch.states[row].prompt_len for row in rows.tolist()])
        return (positions < 13) | (lengths != 3)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_sequence_fails_at_the_same_token_as_without_drafts(wrong: float, restarts: bool) -> None:
    """Also if the scheduler dies with the status unheard: its successor must not wait for a row that never comes."""
    for turns in choice(range(1, 9), in_ci=[3, 5]):
        stack = Stack(depth=3)
        stack.drafts = Always(7)
        stack.add_runner(backend(wrong, LosesPrecision))
        stack.step()
        request = stack.submit([1, 2, 3], 40)
        other = stack.submit([4, 5, 6, 7], 20)
        advance(stack, turns)
        if restarts:
            stack.step()
            while stack.runners.execute(max(stack.runners.runners)):
                pass
            stack.restart_scheduler()
        advance_until_idle(stack)
        (stream,) = request.streams
        assert stream.end is not None and stream.end.reason == FinishReason.ERROR
        assert stream.tokens == expected_tokens([1, 2, 3], 10, eos_probability=0.0)
        assert_whole(other)
        stack.assert_clean()


@pytest.mark.parametrize("speculates", [False, True])
def test_a_row_that_fails_beside_runs_does_not_disturb_plans_in_flight(speculates: bool) -> None:
    """The next plan, which is launched before its status is known, begins at the token that it could not draw."""
    stack = Stack(depth=3)
    stack.drafts = Always(3)
    session = stack.add_runner(backend(0.5, LosesPrecision))
    stack.step()
    other, request = stack.submit([1, 2, 3, 4], 40), stack.submit([5, 6, 7], 40, no_speculation=not speculates)
    for _ in range(40):
        stack.whole_turn(session, most_plans=3)
    stack.step()
    assert stack.runners.most_launched == 3
    assert request.streams[0].end is not None and request.streams[0].end.reason == FinishReason.ERROR
    assert request.streams[0].tokens == expected_tokens([5, 6, 7], 10, eos_probability=0.0)
    assert_whole(other)
    stack.assert_clean()


@pytest.mark.parametrize("wrong", WRONG)
def test_ends_within_runs_are_those_without_drafts(wrong: float) -> None:
    """Each request stops at another of its own tokens, from the first to the last, and none computes anything after."""
    stack = stack_of(wrong)
    text = expected_tokens([9, 8, 7], 30, eos_probability=0.0)
    requests = [
        stack.submit([9, 8, 7], 30, sampling=sampling(stop_ids=pack([token, IM_END_ID]), min_tokens=least))
        for least in (0, 5)
        for token in text[::4]
    ]
    advance_until_idle(stack)
    for request in requests:
        (stream,) = request.streams
        expected = request.expected(0, 0.0)
        assert stream.tokens == expected and stream.end is not None
        assert (stream.end.reason == FinishReason.STOP) == (len(expected) < 30 or expected[-1] in (text[28],))
    assert stack.engine.requests.totals.sampled_tokens == sum(len(r.streams[0].tokens) for r in requests)
    stack.assert_clean()


def test_what_a_run_kept_behind_an_end_is_dropped_in_a_takeover() -> None:
    """The runner accepted a run with a stop token in it, and its scheduler died before the result came."""
    text = expected_tokens([9, 8, 7], 30, eos_probability=0.0)
    for place in range(4, 8):
        stack = stack_of(0.0, depth=1, retention_s=60, retention_requests=9)
        request = stack.submit([9, 8, 7], 30, sampling=sampling(stop_ids=pack([text[place]])))
        while len(request.streams[0].tokens if request.streams else []) < 2:
            advance(stack)
        stack.step()
        (session,) = stack.runners.runners
        stack.runners.execute(session)
        stack.runners.finish(session)
        (resident,) = stack.runners.runners[session].snapshot().sequences
        assert len(ints(resident.tokens)) > 3 + place + 1, "the case is not met"
        stack.restart_scheduler()
        advance_until_idle(stack)
        (stream,) = request.streams
        assert stream.tokens == text[: place + 1] and stream.end is not None
        assert stream.end.reason == FinishReason.STOP and stream.end.num_tokens == place + 1
        stack.assert_clean()
