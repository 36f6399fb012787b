"""How many blocks are only kept for waiting sequences, against a count of all."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.kv.block_pool import BlockPool
from tests.support.thoroughness import count


@pytest.mark.parametrize("seed", range(count(30, in_ci=3)))
def test_the_number_is_that_of_blocks_without_another_reference(seed: int) -> None:
    rng, pool = random.Random(seed), BlockPool(24, 16)
    tables: list[list[int]] = []
    pins: list[list[int]] = []
    for step in range(200):
        live = sorted({block for blocks in tables + pins for block in blocks})
        some = rng.sample(live, rng.randint(0, min(4, len(live))))
        match rng.randrange(5):
            case 0 if pool.num_free >= 3:
                tables.append(pool.allocate(rng.randint(0, 3)))
            case 1:
                pool.share(some)
                tables.append(some)
            case 2:
                pool.keep(some)
                pins.append(some)
            case 3 if tables:
                pool.release(tables.pop(rng.randrange(len(tables))), step)
            case 4 if pins:
                pool.let_go(pins.pop(rng.randrange(len(pins))))
            case _:
                continue
        pool.kept.check(pins)
        pool.check(tables + pins)
