"""Under preemption, chunking, lateness and crowding every stream equals its solo output, and no state is left over."""

from __future__ import annotations

import random

import pytest

from roster_protos import plan_pb2
from runner_svc.backends.byte_tokenizer import IM_END_ID
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.model.sequence import FinishReason
from scheduler_svc.plan.plan_draft import pack
from tests.support.drafters import LateHash, drafting_backend
from tests.support.in_process import Stack, Submitted
from tests.support.scripted_drafts import RandomDrafts
from tests.support.thoroughness import count, pairs

EOS_PROBABILITY = 1 / 48
NUM_REQUESTS = count(60, in_ci=14)
"""Per combination."""


DRAFTING = 2 / 3
"""Share of the runners that draft, in random steps and with random lies."""


def backend(
    rng: random.Random, block_size: int, num_blocks: int, slots: int | None = None, step_tokens: int | None = None
) -> HashBackend:
    slots = slots or rng.randint(2, 6)
    sizes = {
        "num_slots": slots, "block_size": block_size, "num_blocks": num_blocks, "context_length": 512,
        "max_step_tokens": step_tokens or rng.randint(slots, 64), "eos_probability": EOS_PROBABILITY,
    }  # fmt: skip
    if rng.random() >= DRAFTING:
        return HashBackend(**sizes)
    kind = rng.choice((HashBackend, LateHash))
    return drafting_backend(kind, rng, wrong=rng.choice((0.0, 0.3)), max_drafts=rng.randint(1, 7), **sizes)


def stack_of(rng: random.Random, **settings: object) -> Stack:
    stack = Stack(**settings)
    stack.drafts = RandomDrafts(rng)
    return stack


def sampling(rng: random.Random) -> plan_pb2.Sampling:
    stop_ids = [IM_END_ID, *(rng.randrange(256) for _ in range(rng.choice((0, 0, 2, 6))))]
    return plan_pb2.Sampling(
        temperature=rng.choice((0.0, 1.0)),
        top_p=1,
        repetition_penalty=1,
        min_tokens=rng.choice((0, 0, 3)),
        stop_ids=pack(stop_ids),
    )


def submit_random(stack: Stack, rng: random.Random, most: int) -> Submitted:
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, most // 2))]
    max_tokens = rng.randint(1, most - len(prompt))
    received = [rng.randrange(200) for _ in range(rng.randint(0, max_tokens - 1))] if rng.random() < 0.1 else []
    return stack.submit(
        prompt,
        max_tokens,
        sampling=sampling(rng),
        n=1 if received else rng.choice((1, 1, 1, 3)),
        received=pack(received),
    )


def assert_equal_to_solo(stack: Stack) -> int:
    """Compares every stream with the slow reference; returns the number of streams."""
    for request in stack.requests.values():
        assert request.refused is None and request.first_sequence_id is not None
        for index in range(request.submit.n):
            stream = stack.streams[request.first_sequence_id + index]
            expected = request.expected(index, EOS_PROBABILITY)
            received = len(request.submit.received) // 4
            assert stream.tokens == expected[received:]
            assert stream.end is not None and stream.end.num_tokens == len(expected)
            if stream.end.reason == FinishReason.STOP:
                assert stream.end.stop_token_id == expected[-1]
            else:
                assert stream.end.reason == FinishReason.LENGTH and len(expected) == request.submit.max_tokens
    return len(stack.streams)


def assert_random_streams_are_exact(stack: Stack, rng: random.Random, most: int, num_requests: int) -> None:
    """Serves random requests of up to `most` tokens; each stream equals its solo output, and no state is left over."""
    for _ in range(num_requests):
        submit_random(stack, rng, most)
        for _ in range(rng.randrange(8)):
            stack.turn(rng)
    stack.run(rng)
    assert assert_equal_to_solo(stack) >= num_requests
    stack.assert_clean()


@pytest.mark.parametrize(
    ("depth", "block_size", "policy", "prefix_sharing"),
    pairs((1, 2, 3), (1, 8, 16, 32), ("auto", "orca", "static"), (False, True)),
)
def test_streams_equal_their_solo_output(depth: int, block_size: int, policy: str, prefix_sharing: bool) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    stack = stack_of(rng, depth=depth, policy=policy, prefix_sharing=prefix_sharing)
    num_blocks = max(4, 96 // block_size)
    stack.add_runner(backend(rng, block_size, num_blocks))
    assert_random_streams_are_exact(stack, rng, num_blocks * block_size, NUM_REQUESTS)


def test_a_tiny_pool_preempts_again_and_again_and_changes_nothing() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    stack = stack_of(rng, depth=2)
    session = stack.add_runner(backend(rng, 4, 24, slots=8, step_tokens=32))
    for _ in range(count(250, in_ci=100)):
        submit_random(stack, rng, 96)
    stack.run(rng)
    assert_equal_to_solo(stack)
    stack.assert_clean()
    assert stack.engine.pool.schedulers[session].preemptions > count(200, in_ci=20)


def test_runners_that_die_cost_no_token() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    stack = stack_of(rng, depth=2)
    for _ in range(2):
        stack.add_runner(backend(rng, 8, 24))
    for number in range(count(120, in_ci=60)):
        submit_random(stack, rng, 160)
        for _ in range(rng.randrange(12)):
            stack.turn(rng)
        if number % 15 == 14:
            stack.runners.kill(rng.choice(list(stack.runners.runners)))
            stack.step()
            stack.add_runner(backend(rng, 8, 24))
    stack.run(rng)
    assert_equal_to_solo(stack)
    stack.assert_clean()
