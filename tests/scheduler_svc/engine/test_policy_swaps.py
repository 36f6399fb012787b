"""Policies swapped in random order under load: every stream is complete and equals its solo output.

`ROSTER_TEST_SWAPS=10000 pytest tests/scheduler_svc/engine/test_policy_swaps.py -s` runs the full count.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import Policy, UnknownPolicy, available_policies, policy_class
from tests.support.in_process import Stack

EOS_PROBABILITY = 1 / 32
NUM_SWAPS = int(os.environ.get("ROSTER_TEST_SWAPS", "500"))
PARAMETERS: list[dict[str, int]] = [{}, {"step_tokens": 24}, {"step_tokens": 24, "finish_tokens": 1000}]
STEMS = [[stem, *range(60)] for stem in range(4)]


def installed_policies() -> list[type[Policy]]:
    """Returns every installed policy that can be imported."""
    found = []
    for name in available_policies():
        try:
            found.append(policy_class(name))
        except UnknownPolicy as error:
            print(error)
    return found


def submit(stack: Stack, rng: random.Random) -> None:
    """Submits a request of a random tenant, class and target, with a prompt that shares its start with others."""
    prompt = rng.choice(STEMS)[: rng.randint(1, 60)] + rng.choices(range(256), k=rng.randint(1, 8))
    sampling = plan_pb2.Sampling(
        temperature=rng.choice((0.0, 1.0)), top_p=1, repetition_penalty=1, stop_ids=pack([IM_END_ID])
    )
    stack.submit(
        prompt,
        min(60, int(rng.expovariate(1 / 16)) + 1),
        sampling=sampling,
        n=rng.choice((1, 1, 1, 2)),
        tenant=rng.choice(("a", "b", "c")),
        priority=rng.randint(-2, 2),
        ttft_target_ms=10**9,
        itl_target_ms=10**9,
    )


@pytest.mark.timeout(3600)
def test_swaps_under_load_cost_no_stream_a_token() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    policies = installed_policies()
    assert len(policies) >= 3
    stack = Stack(depth=2, max_waiting_requests=1 << 20)
    backend = HashBackend(
        num_slots=12,
        block_size=8,
        num_blocks=30,
        max_step_tokens=64,
        context_length=256,
        eos_probability=EOS_PROBABILITY,
    )
    session = stack.add_runner(backend)
    stack.step()
    start, waited = time.monotonic(), 0
    for _ in range(NUM_SWAPS):
        chosen = rng.choice(policies)
        stack.engine.swap.most_ranked = rng.choice((1, 3, 256))
        stack.engine.change_policy(chosen(chosen.Parameters(**rng.choice(PARAMETERS))))
        while len(stack.engine.requests.queue) < 20:
            submit(stack, rng)
            stack.now_s += rng.random() / 10
            stack.step()
        waited += len(stack.engine.requests.queue)
        for _ in range(rng.randrange(20)):
            stack.turn(rng)
    stack.run(rng, max_turns=10**6)
    for request in stack.requests.values():
        assert request.refused is None and request.first_sequence_id is not None
        for index in range(request.submit.n):
            stream = stack.streams[request.first_sequence_id + index]
            assert stream.end is not None
            assert stream.tokens == request.expected(index, EOS_PROBABILITY)
    stack.assert_clean()
    assert stack.engine.policy.failures == 0, stack.engine.policy.last_failure
    scheduler = stack.engine.pool.schedulers[session]
    print(
        f"{NUM_SWAPS} swaps among {', '.join(policy.name for policy in policies)} in {time.monotonic() - start:.0f} s: "
        f"{len(stack.streams)} streams, {waited / NUM_SWAPS:.0f} waiting on average, {scheduler.preemptions} "
        f"preemptions, {scheduler.cached_tokens} prompt tokens from the cache, no difference"
    )
    assert len(stack.streams) > NUM_SWAPS / 4
    assert scheduler.preemptions > NUM_SWAPS / 100


@pytest.mark.parametrize("seed", [3, 4, 10, 11, 21, 26])
def test_swaps_and_dying_runners_lose_no_request(seed: int) -> None:
    """Requests that share prefixes, are quarantined, or are placed on runners that die, while policies change."""
    rng = random.Random(seed)
    policies = installed_policies()
    stack = Stack(depth=rng.randint(1, 3))

    def add_runner() -> None:
        backend = HashBackend(
            num_slots=3,
            block_size=4,
            num_blocks=33,
            max_step_tokens=10,
            context_length=128,
            eos_probability=EOS_PROBABILITY,
        )
        stack.add_runner(backend)

    for _ in range(2):
        add_runner()
    stack.step()
    for _ in range(60):
        happens = rng.choice(("submit", "submit", "turns", "step", "swap", "kill"))
        if happens == "submit":
            submit(stack, rng)
        elif happens == "turns":
            for _ in range(12):
                stack.turn(rng)
        elif happens == "step":
            stack.step()
        elif happens == "swap":
            chosen = rng.choice(policies)
            stack.engine.swap.most_ranked = rng.choice((1, 3, 256))
            stack.engine.change_policy(chosen(chosen.Parameters()))
        else:
            stack.runners.kill(rng.choice(sorted(stack.runners.runners)))
            add_runner()
    stack.run(rng)
    for request in stack.requests.values():
        assert request.first_sequence_id is not None
        for index in range(request.submit.n):
            stream = stack.streams[request.first_sequence_id + index]
            expected = request.expected(index, EOS_PROBABILITY)
            if request.refused is not None:  # rejected as the cause of runner losses
                expected = expected[: len(stream.tokens)]
            assert stream.end is not None and stream.tokens == expected
    stack.assert_clean()
