"""Random walks of a runner whose sequences share prefixes through its host pool only."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.tiers.kv_copier import Direction, Tickets
from runner_svc.tiers.thread_copier import CopyTrouble, ThreadCopier
from tests.support.copy_walk import CopyWalk
from tests.support.host_world import BLOCK_SIZE, HostWorld, MakeCopier
from tests.support.stepped_copier import SteppedCopier
from tests.support.thoroughness import count

NUM_BLOCKS, NUM_HOST_BLOCKS, TURNS = 40, 14, 250


def walked(rng: random.Random, make: MakeCopier) -> CopyWalk:
    sizes = {"num_slots": 4, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "context_length": 64}
    backend = HashBackend(eos_probability=0, **sizes)  # type: ignore[arg-type]
    walk = CopyWalk(HostWorld(make, backend), rng, NUM_BLOCKS, NUM_HOST_BLOCKS)
    for _ in range(TURNS):
        walk.turn()
    return walk


def seeded() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("run", range(count(40, in_ci=4)))
def test_prefixes_from_the_host_pool_are_right_in_any_order(run: int) -> None:
    rng = seeded()
    walk = walked(rng, lambda backend: SteppedCopier(backend.cache_regions, NUM_HOST_BLOCKS, rng))
    assert walk.hits > 5
    # All blocks are there once nothing is in flight.
    walk.world.runner.finish_copies()
    walk.world.execute()
    walk._take_tickets()
    assert not walk.flights and not walk.reading
    used = [block for walker in (*walk.running, *walk.waiting) for block in walker.blocks]
    assert sorted([*walk.free, *used]) == list(range(1, NUM_BLOCKS + 1))
    assert sorted([*walk.blank, *walk.hosted.values()]) == list(range(1, NUM_HOST_BLOCKS + 1))


@pytest.mark.parametrize("run", range(count(10, in_ci=1)))
def test_they_are_right_beside_threads_that_copy(run: int) -> None:
    rng = seeded()
    trouble = CopyTrouble(delay_s=0.002, seed=rng.randrange(1000))
    walk = walked(rng, lambda backend: ThreadCopier(backend.cache_regions, NUM_HOST_BLOCKS, trouble))
    while walk.hits < 30:  # steps are much faster than these copies
        walk.turn()


class RotatedLoads(SteppedCopier):
    """Loads each block of a ticket into the place of the next one."""

    def start(self, offloads: Tickets, loads: Tickets) -> None:
        ends = np.cumsum(loads.counts)[:-1]
        rolled = [np.roll(targets, 1) for targets in np.split(loads.targets, ends)]
        super().start(offloads, replace(loads, targets=np.concatenate(rolled)))


class EarlyLoads(SteppedCopier):
    """Reports a ticket of several blocks before the last of them is there."""

    def copy_block(self, direction: Direction) -> bool:
        pairs = self._queues[direction][0][1]
        if direction is Direction.LOAD and len(pairs) == 2:
            pairs.pop()
        return super().copy_block(direction)


class LateOffloads(SteppedCopier):
    """Reports an offload although its block is copied only when the next one is."""

    def copy_block(self, direction: Direction) -> bool:
        if direction is Direction.LOAD:
            return super().copy_block(direction)
        pairs = self._queues[direction][0][1]
        late, self.late = self.late, pairs[0]
        if late is None:
            pairs[0] = (pairs[0][0], 0)  # the dummy block
        else:
            pairs[0] = late
        return super().copy_block(direction)

    late: tuple[int, int] | None = None


@pytest.mark.parametrize("broken", [RotatedLoads, EarlyLoads, LateOffloads])
def test_the_walk_notices_copies_that_are_wrong(broken: type[SteppedCopier]) -> None:
    def fails(seed: int) -> bool:
        rng = random.Random(seed)
        try:
            walked(rng, lambda backend: broken(backend.cache_regions, NUM_HOST_BLOCKS, rng))
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(5))
