"""Sequences move without recomputation: out of a runner that leaves, and from prefill to decode runners."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from scheduler_svc.moves.move_counts import Use
from scheduler_svc.policy import Policy, PolicyGuard, PolicyParameters, RunnerView, RunningView
from tests.support.moving_stack import add_runner, check, moving_stack, run
from tests.support.thoroughness import in_turn

PROMPTS = [[number, *range(40 + 5 * number)] for number in range(6)]
NUM_TOKENS = 60


def test_a_leaving_runner_recomputes_nothing() -> None:
    stack = moving_stack("", "")
    for prompt in PROMPTS:
        stack.submit(prompt, NUM_TOKENS)
    run(stack, 15)
    leaving = stack.engine.pool.schedulers[1]
    assert leaving.table.num_running == 3
    computed = sum(scheduler.prefill_tokens for scheduler in stack.engine.pool.schedulers.values())
    stack.runners.leave(1)
    run(stack, 30)
    assert list(stack.engine.pool.schedulers) == [2]
    assert stack.runners.moves is not None and 1 in stack.runners.moves.dismissed
    run(stack, 100)
    check(stack)
    counts = stack.engine.moves.counts
    assert counts.done[Use.DRAIN] == 3 and not counts.failed
    stayed = stack.engine.pool.schedulers[2]
    # Each moved sequence computes its last token there in a row that is no decoding one.
    assert leaving.prefill_tokens + stayed.prefill_tokens == computed + 3
    assert stack.engine.requests.totals.recomputed == 0


def test_prompts_are_computed_by_one_runner_and_decoded_by_another() -> None:
    stack = moving_stack("prefill", "decode")
    for prompt in PROMPTS:
        stack.submit(prompt, NUM_TOKENS)
    run(stack, 150)
    check(stack)
    prefill, decode = stack.engine.pool.schedulers[1], stack.engine.pool.schedulers[2]
    assert stack.engine.moves.counts.done[Use.ROLE] == len(PROMPTS)
    assert prefill.prefill_tokens >= sum(map(len, PROMPTS)) and decode.prefill_tokens == len(PROMPTS)
    assert prefill.last_plan < 40 < decode.last_plan


class ByLength(Policy):
    """Short outputs stay where their prompts are computed, and of the others those of long prompts go to one runner."""

    def __init__(self) -> None:
        super().__init__(PolicyParameters())
        self.asked = list[tuple[str, ...]]()

    def decode_on(self, sequence: RunningView, runners: Sequence[RunnerView]) -> RunnerView | None:
        self.asked.append(tuple(f"{one.runner_id} {one.role}" for one in runners))
        assert all(0 < one.free_slots <= one.slots == 8 and 0 < one.free_blocks <= one.blocks for one in runners)
        assert all(one.cached == 0 and (one.context > 0) == (one.decoding > 0) for one in runners)
        if sequence.request.max_tokens < 20:
            return None
        wanted = "runner-3" if sequence.request.prompt_tokens > 50 else "runner-2"
        return next(one for one in runners if one.runner_id == wanted)


def test_the_policy_chooses_where_a_prompt_is_decoded() -> None:
    policy = ByLength()
    stack = moving_stack("prefill", "decode", "decode", guard=PolicyGuard(policy))
    for prompt in PROMPTS:
        stack.submit(prompt, 15 if len(prompt) == 46 else NUM_TOKENS)
    decoded = dict[int, set[int]]()
    for _ in range(150):
        run(stack, 1)
        for session, scheduler in stack.engine.pool.schedulers.items():
            for sequence in scheduler.table.running():
                if len(sequence.log) > sequence.prompt_len + 12:
                    decoded.setdefault(sequence.prompt_len, set()).add(session)
    check(stack)
    assert decoded == {41: {2}, 46: {1}, 51: {3}, 56: {3}, 61: {3}, 66: {3}}
    assert stack.engine.moves.counts.done[Use.ROLE] == 5 and not stack.engine.requests.policy.failures
    assert policy.asked[0] == ("runner-2 decode", "runner-3 decode")
    assert len(policy.asked) < 20, "what stays is asked about again too often"


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("decode", "decode"), ("prefill", "prefill")])
def test_any_runner_does_both_where_a_role_is_missing(roles: tuple[str, ...]) -> None:
    stack = moving_stack(*roles)
    for prompt in PROMPTS:
        stack.submit(prompt, NUM_TOKENS)
    run(stack, 150)
    check(stack)
    assert not stack.engine.moves.counts.begun


def test_a_decode_runner_computes_prompts_that_no_other_runner_can_hold() -> None:
    stack = moving_stack("decode", num_blocks=64)
    add_runner(stack, "", num_blocks=16)
    stack.step()
    stack.submit(list(range(100)), 20)
    stack.submit(list(range(20)), 20)
    run(stack, 100)
    check(stack)
    assert (
        stack.engine.pool.schedulers[1].prefill_tokens == 100 and stack.engine.pool.schedulers[2].prefill_tokens == 20
    )


@pytest.mark.parametrize("seed", in_turn(range(600), in_ci=8))
def test_moves_between_slow_and_lossy_runners(seed: int) -> None:
    rng = random.Random(seed)
    roles = rng.choice([("", "", ""), ("prefill", "decode", "decode"), ("prefill", "", "decode")])
    stack = moving_stack(*roles, rng=rng, num_blocks=rng.choice([64, 128, 256]), depth=rng.randint(1, 3))
    for prompt in PROMPTS:
        stack.submit(prompt, NUM_TOKENS, n=rng.choice([1, 2]))
    for turn in range(600):
        run(stack, 1)
        if turn % 25 == 24 and len(stack.runners.runners) > 1 and rng.random() < 0.3:
            session = rng.choice(list(stack.runners.runners))
            if rng.random() < 0.5:
                stack.runners.leave(session)
            else:
                stack.runners.kill(session)
        if len(stack.runners.runners) < 3 and rng.random() < 0.05:
            add_runner(stack, num_blocks=128)
    for _ in range(400):
        stack.whole_turn(*list(stack.runners.runners), turn_s=0.1, most_plans=2)
    check(stack)


def test_no_block_is_written_that_a_snapshot_may_still_name() -> None:
    """A sequence has left its slot, but the plan that says so has not been made: the next scheduler would find it in
    the runner's snapshot, with the blocks that are now to be written."""
    stack = moving_stack("", "", num_blocks=24)
    request = stack.submit([7, *range(40)], 40)
    stack.submit(list(range(60)), 2)
    run(stack, 8)
    (target,) = [session for session, each in stack.engine.pool.schedulers.items() if each.plans._releases]
    other = 3 - target
    assert stack.engine.pool.schedulers[other].table.num_running == 1
    assert stack.runners.moves is not None
    stack.runners.moves.stalled = True
    stack.runners.leave(other)
    while not stack.runners.moves.copies:
        run(stack, 1)
    (copy,) = stack.runners.moves.copies
    assert copy.session == target
    assert not stack.runners.runners[target].snapshot().sequences
    stack.runners.moves.stalled = False
    run(stack, 60)
    check(stack)
    assert request.streams[0].end is not None and stack.engine.moves.counts.done[Use.DRAIN] == 1


def test_runners_that_do_not_reach_each_other_are_left_alone_ever_longer() -> None:
    stack = moving_stack("prefill", "decode")
    assert stack.runners.moves is not None
    stack.runners.moves.unreachable = True
    for prompt in PROMPTS:
        stack.submit(prompt, 2000 // len(PROMPTS) - len(prompt))
    run(stack, 250)
    counts = stack.engine.moves.counts
    # They begin at once, and again after 1 s; the next attempt is due after 3 s.
    assert len(PROMPTS) <= counts.begun[Use.ROLE] == counts.failed <= 2 * len(PROMPTS)
    stack.runners.leave(1)
    run(stack, 20)
    assert list(stack.engine.pool.schedulers) == [2], "a runner waits for moves that can't succeed"
    run(stack, 500)
    check(stack)
