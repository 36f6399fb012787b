"""Hit rates on a part of Mooncake's traces: the pool and a plain LRU cache, the simulator and the pool."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest

from bench.prefix_hits import DEFAULT_TRACES, pool_hits, references, simulated_hits
from scheduler_svc.simulator.trace import Trace, read_trace
from tests.support.thoroughness import choice

EVERYTHING = 1 << 17


def lru_hits(trace: Trace, size: int) -> int:
    """Returns the blocks hit in a plain LRU cache of `size` blocks; a request touches its blocks deepest first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        for number in request.prefix_hash_ids:
            if number not in cache:
                break
            hits += 1
        for number in reversed(request.prefix_hash_ids):
            cache[number] = None
            cache.move_to_end(number)
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("path", DEFAULT_TRACES, ids=lambda path: path.name.split("_")[1])
def test_the_pool_evicts_as_lru_does(path: Path) -> None:
    trace = read_trace(path, 2000)
    for size in (1000, 5000, EVERYTHING):
        ours, plain = pool_hits(trace, size), lru_hits(trace, size)
        assert abs(ours - plain) <= 0.01 * references(trace), f"{size} blocks: {ours} hits, a plain LRU cache {plain}"
    assert pool_hits(trace, EVERYTHING) == lru_hits(trace, EVERYTHING)


@pytest.mark.parametrize("path", DEFAULT_TRACES, ids=lambda path: path.name.split("_")[1])
def test_the_engine_hits_what_the_pool_promises(path: Path) -> None:
    trace = read_trace(path, 700)
    total = references(trace)
    rates = [simulated_hits(trace, size) / total for size in choice((500, 2000, EVERYTHING), in_ci=(2000, EVERYTHING))]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(pool_hits(trace, EVERYTHING) / total, abs=0.01)
    assert rates[-2] == pytest.approx(pool_hits(trace, 2000) / total, abs=0.03)
