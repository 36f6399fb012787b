"""The load that a policy's `admit` receives, of one runner and of several."""

from __future__ import annotations

import math

import pytest

from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.policy import Accept, Load, Policy, PolicyGuard, PolicyParameters, RequestView
from tests.support.in_process import Stack
from tests.support.lockstep import advance


class Listens(Policy):
    """Accepts every request and records the latest load."""

    load: Load

    def admit(self, request: RequestView, load: Load) -> Accept:
        self.load = load
        return Accept()


@pytest.mark.parametrize("runners", [1, 2, 3])
def test_the_load_is_of_all_runners_and_can_be_had_for_one(runners: int) -> None:
    policy = Listens(PolicyParameters())
    stack = Stack(guard=PolicyGuard(policy))
    for _ in range(runners):
        stack.add_runner(
            HashBackend(
                num_slots=4, block_size=8, num_blocks=64, max_step_tokens=16, context_length=256, eos_probability=0
            )
        )
    stack.step()
    for seed in range(runners):
        stack.submit([1, 2, 3], 100, seed=seed)
    advance(stack, 6)
    stack.submit([4, 5], 10)
    stack.step()
    load = policy.load
    assert (load.runners, load.running, load.decoding) == (runners, runners, runners)
    assert (load.slots, load.blocks, load.max_step_tokens) == (4 * runners, 64 * runners, 16 * runners)
    assert load.context > 3 * runners and load.free_blocks < load.blocks
    assert load.step_times is stack.engine.ledger.step_times is not None
    assert load.of_one_runner() == Load(
        running=1,
        decoding=1,
        slots=4,
        waiting=0,
        waiting_tokens=0,
        free_blocks=load.free_blocks // runners,
        blocks=64,
        block_size=8,
        max_step_tokens=16,
        now_s=load.now_s,
        context=load.context // runners,
        itl_target_s=math.inf,
        step_times=load.step_times,
        queue_runners=runners,
    )


def test_without_a_runner_there_is_nothing_to_deal_out() -> None:
    policy = Listens(PolicyParameters())
    stack = Stack(guard=PolicyGuard(policy), no_runner_s=1e6)
    session = stack.add_runner(HashBackend())
    stack.step()
    stack.runners.kill(session)
    stack.step()
    stack.submit([4, 5], 10)
    stack.step()
    assert policy.load.runners == 0 and policy.load.of_one_runner() is policy.load
