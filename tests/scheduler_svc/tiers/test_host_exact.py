"""With a tiny cache, a small host pool, and copies that are late or lost, every stream equals its solo output."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.scheduler.scheduler import Scheduler
from tests.scheduler_svc.engine.test_engine_exact import assert_equal_to_solo, backend, sampling, stack_of
from tests.support.in_process import Stack
from tests.support.thoroughness import count, pairs

NUM_REQUESTS = count(120, in_ci=30)


def submit_turn(stack: Stack, rng: random.Random, stems: list[list[int]], most: int) -> None:
    """Submits a request that continues one of a few conversations."""
    stem = rng.choice(stems)
    prompt = [*stem[: rng.randint(0, len(stem))], *(rng.randrange(256) for _ in range(rng.randint(1, 9)))][: most - 2]
    stack.submit(prompt, rng.randint(1, most - len(prompt)), sampling=sampling(rng), n=rng.choice((1, 1, 1, 3)))


def schedulers(stack: Stack) -> list[Scheduler]:
    return list(stack.engine.pool.schedulers.values())


@pytest.mark.parametrize(
    ("depth", "block_size", "num_runners", "lost"), pairs((1, 2, 3), (1, 4, 16), (1, 2), (0.0, 0.3))
)
def test_streams_equal_their_solo_output(depth: int, block_size: int, num_runners: int, lost: float) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    stack = stack_of(rng, depth=depth)
    num_blocks = max(6, 96 // block_size)
    for _ in range(num_runners):
        host_blocks = rng.choice((num_blocks // 2, 2 * num_blocks, 8 * num_blocks))
        stack.add_runner(backend(rng, block_size, num_blocks), host_blocks, random.Random(rng.random()), lost)
    stems = [[rng.randrange(256) for _ in range(num_blocks * block_size)] for _ in range(4)]
    for _ in range(NUM_REQUESTS):
        submit_turn(stack, rng, stems, num_blocks * block_size)
        for _ in range(rng.randrange(24)):
            stack.turn(rng)
    stack.run(rng)
    assert assert_equal_to_solo(stack) >= NUM_REQUESTS
    stack.assert_clean()
    assert any(scheduler.tiers and scheduler.tiers.offloads.counts.blocks for scheduler in schedulers(stack))
