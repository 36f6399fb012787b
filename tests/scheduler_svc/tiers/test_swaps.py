"""A sequence that would soon be preempted goes to the host pool, and comes back without being computed again."""

from __future__ import annotations

import pytest

from roster_protos import engine_pb2
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.copy_times import CopyTimes
from scheduler_svc.kv.host_pool import HostPool
from scheduler_svc.model.sequence import Phase
from scheduler_svc.scheduler.swapping import Swapping
from scheduler_svc.step_times.step_time_model import StepTimeModel
from scheduler_svc.tiers.loads import UNKNOWN_DEADLINE_S, HostLoads, Tail
from tests.support.in_process import Submitted
from tests.support.sharing import SIZE, Service, prompt, service

BLOCKS = 24
OUTPUT = 9 * SIZE


def crowded(host_blocks: int = 4 * BLOCKS, **settings: object) -> tuple[Service, list[Submitted]]:
    """Returns a service with two sequences that together need more blocks than there are, both decoding."""
    served = service(slots=2, num_blocks=BLOCKS, host_blocks=host_blocks, **settings)
    requests = [served.stack.submit(prompt(5 * SIZE + 3, seed), OUTPUT) for seed in (1, 2)]
    served.advance(4)
    assert served.scheduler.table.num_running == 2
    return served, requests


def swapping(served: Service) -> Swapping:
    assert served.scheduler.swapping is not None
    return served.scheduler.swapping


def until_swapped(served: Service) -> None:
    """Runs turns until a sequence has been swapped out."""
    for _ in range(200):
        if swapping(served).swaps:
            return
        served.advance()
    raise AssertionError("nothing was swapped out")


def finish(served: Service, requests: list[Submitted], copies: bool = True) -> int:
    """Finishes all requests; returns how many positions were computed a second time."""
    served.finish(copies)
    for request in requests:
        served.cached(request)
    prompts = sum(len(request.submit.prompt) // 4 for request in requests)
    return served.scheduler.prefill_tokens - prompts


def test_a_swapped_sequence_comes_back_with_its_last_partial_block() -> None:
    served, requests = crowded()
    computed_again = finish(served, requests)
    assert swapping(served).swaps == 1 and served.scheduler.preemptions == 1
    assert computed_again <= served.scheduler.depth + 1, "only the tokens whose rows were in flight"
    served.stack.assert_clean()


def test_running_sequences_get_the_blocks_before_they_need_them() -> None:
    """The running sequence decodes in every step while the other one is copied."""
    served, requests = crowded()
    until_swapped(served)
    length = len(requests[0].streams[0].tokens)
    for _ in range(3):
        served.advance()
    assert len(requests[0].streams[0].tokens) >= length + 3
    assert finish(served, requests) <= served.scheduler.depth + 1


def test_a_block_under_offload_is_not_written() -> None:
    """The copies are late: the running sequence stops where it needs one of their blocks, and goes on once they end."""
    served, requests = crowded()
    until_swapped(served)
    served.advance(60)
    stream = requests[0].streams[0]
    length = len(stream.tokens)
    assert stream.end is None and served.scheduler.pool.num_free == 0
    served.copy()
    served.advance(3)
    assert len(stream.tokens) > length
    finish(served, requests)
    served.stack.assert_clean()


def test_a_load_that_is_late_is_computed_again() -> None:
    served, requests = crowded()
    until_swapped(served)
    served.copy()
    while requests[0].streams[0].end is None:
        served.advance()
    for seed in range(3, 7):  # others take the blocks that its KV is in
        requests.append(served.stack.submit(prompt(10 * SIZE, seed), 3, priority=5))
    served.advance(2)
    served.stack.now_s += UNKNOWN_DEADLINE_S
    finish(served, requests)
    served.stack.assert_clean()


def test_computing_is_preferred_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    served, requests = crowded()
    assert served.scheduler.tiers is not None
    served.scheduler.tiers.loads.times.note(1, 10.0)
    monkeypatch.setattr(StepTimeModel, "known", True)
    monkeypatch.setattr(StepTimeModel, "seconds", lambda self, positions, rows, context, start=0: 0.001 * positions)
    finish(served, requests)
    assert not swapping(served).swaps and served.scheduler.preemptions


def test_a_sequence_that_the_host_pool_cannot_hold_is_not_swapped_out() -> None:
    """Without its first blocks the rest would be of no use."""
    served, requests = crowded(host_blocks=4)
    finish(served, requests)
    assert not swapping(served).swaps and served.scheduler.preemptions
    served.stack.assert_clean()


def test_copies_of_a_sequence_are_not_evicted_for_the_rest_of_it() -> None:
    """Its first blocks were loaded, so their copies are duplicates, which go first when its others need room."""
    served, _ = crowded()
    assert served.scheduler.tiers is not None
    table, host = served.scheduler.table, served.scheduler.tiers.host
    first = [served.scheduler.prefix.shareable_names(table.at(slot), 3 * SIZE) for slot in range(2)]
    for names in first:
        host.written(host.write(names))
        host.note_used(names)
    host.written(host.write([bytes([number]) * 16 for number in range(host.num_free)]))
    assert (host.num_free, host.num_duplicates) == (0, 6)
    until_swapped(served)
    kept = [all(map(host.has, names)) for names in first]
    assert sorted(kept) == [False, True], "those of the sequence that runs on go"


def test_what_was_computed_before_a_flush_is_not_swapped() -> None:
    served, requests = crowded()
    served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=1))
    finish(served, requests)
    assert not swapping(served).swaps
    served.stack.assert_clean()


def test_a_swapped_sequence_can_be_cancelled() -> None:
    served, requests = crowded()
    until_swapped(served)
    for request in requests:
        served.stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    served.finish()
    served.stack.assert_clean()


def test_a_flush_makes_a_swapped_sequence_compute_again() -> None:
    served, requests = crowded()
    until_swapped(served)
    served.copy()
    served.advance()
    served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=1))
    assert finish(served, requests) > 5 * SIZE
    served.stack.assert_clean()


def test_a_partial_block_is_read_once_in_a_plan() -> None:
    """Greedy choices of a request may be equal, so that their partial blocks have one name."""

    class Waiting:
        swapped, phase = 3, Phase.WAITING

    pool, host = BlockPool(8, SIZE), HostPool(4)
    (source,) = host.write([bytes(16)])
    host.written([source])
    loads = HostLoads(pool, host, CopyTimes(0), StepTimeModel(), lambda: 0.0)
    first, second = Waiting(), Waiting()
    assert loads.begin(first, [], [], Tail(source, 3)) is not None  # type: ignore[arg-type]
    assert loads.begin(second, [], [], Tail(source, 3)) is None  # type: ignore[arg-type]
    loads.line.send(plan=1)
    assert loads.begin(second, [], [], Tail(source, 3)) is not None  # type: ignore[arg-type]
    pool.check(loads.held())
