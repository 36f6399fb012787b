"""Stop tokens of many sequences against a look-up per token, as sequences join and leave."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler_svc.plan.stop_tokens import COMPARED, StopTokens


@pytest.mark.parametrize("distinct", [1, 3, COMPARED, COMPARED + 1, 200])
def test_places_are_those_of_looking_each_token_up(distinct: int) -> None:
    rng = random.Random(distinct)
    stops, running = StopTokens(), list[frozenset[int]]()
    for _ in range(300):
        if running and rng.random() < 0.5:
            stops.remove(running.pop(rng.randrange(len(running))))
        else:
            running.append(frozenset(rng.choices(range(distinct), k=rng.randrange(4))))
            stops.add(running[-1])
        known = frozenset[int]().union(*running)
        tokens = [rng.randrange(3 * distinct) for _ in range(rng.choice([0, 1, 9]))]
        expected = [index for index, token in enumerate(tokens) if token in known]
        assert stops.places(np.array(tokens, np.int32)) == expected
        assert bool(stops) == bool(known)
