"""What left the cache comes back from the host pool: what waits for it, for how long, and what a failure does."""

from __future__ import annotations

import pytest

from roster_protos import engine_pb2
from runner_svc.backends.hash_backend import HashBackend
from scheduler_svc.kv.block_hashes import chain_hashes, root_hash
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.scheduler.scheduler_check import check_scheduler
from scheduler_svc.step_times.step_time_model import StepTimeModel
from scheduler_svc.tiers.loads import SUSPENDED_S, UNKNOWN_DEADLINE_S, HostLoads, Pin
from scheduler_svc.tiers.tiers import Tiers
from tests.support.in_process import Submitted
from tests.support.sharing import OUTPUT, SIZE, Service, prompt, service

LENGTH = 6 * SIZE
LOST = 3
"""Seed of a prompt that the cache has lost."""
FULL = LENGTH // SIZE - 1
"""Blocks of a prompt of LENGTH that a repetition can hit."""


def tiers(served: Service) -> Tiers:
    assert served.scheduler.tiers is not None
    return served.scheduler.tiers


def loads(served: Service) -> HostLoads:
    return tiers(served).loads


def flooded(host_blocks: int = 64, **settings: object) -> Service:
    """Returns a service whose cache has lost the prefix `prompt(LENGTH, LOST)`, of which the host pool has a copy."""
    served = service(slots=2, num_blocks=20, host_blocks=host_blocks, **settings)
    for seed in range(1, 9):
        served.stack.submit(prompt(LENGTH, seed), OUTPUT)
        served.finish()
    assert served.scheduler.pool.num_blank <= 2
    return served


def repeat(served: Service, length: int = LENGTH) -> Submitted:
    """Submits the prompt that the cache has lost, and lets the engine plan."""
    request = served.stack.submit(prompt(LENGTH, LOST)[:length], OUTPUT)
    served.stack.step()
    return request


def test_a_prefix_that_left_the_cache_is_loaded_instead_of_computed() -> None:
    served = flooded()
    computed = served.scheduler.prefill_tokens
    request = repeat(served)
    served.finish()
    assert served.cached(request) == FULL * SIZE
    assert served.scheduler.prefill_tokens - computed == LENGTH - FULL * SIZE
    assert loads(served).counts.hit_tokens == FULL * SIZE and not loads(served).counts.wasted
    served.stack.assert_clean()


def test_a_sequence_waits_for_its_load_while_others_pass() -> None:
    served = flooded()
    waiting = repeat(served)
    passing = served.stack.submit(prompt(SIZE, seed=99), OUTPUT)
    for _ in range(8):
        served.advance()
    assert passing.streams[0].end is not None and not waiting.streams[0].tokens
    assert served.scheduler.table.num_running == 0 and len(served.scheduler.in_flight) == 1, "a held plan without rows"
    served.finish()
    assert served.cached(waiting) == FULL * SIZE
    served.stack.assert_clean()


def test_two_sequences_wait_for_one_load() -> None:
    served = flooded()
    requests = [repeat(served), repeat(served)]
    served.finish()
    assert [served.cached(request) for request in requests] == [FULL * SIZE] * 2
    assert loads(served).counts.blocks == FULL
    served.stack.assert_clean()


def test_a_load_past_its_deadline_is_computed_and_ends_quietly() -> None:
    served = flooded()
    request = repeat(served)
    served.advance()
    served.stack.now_s += UNKNOWN_DEADLINE_S
    served.finish(copies=False)
    assert served.cached(request) == 0
    counts = loads(served).counts
    assert (counts.wasted, counts.blocks) == (FULL, 0) and loads(served).line
    check_scheduler(served.scheduler)
    served.finish()
    assert (counts.wasted, counts.blocks) == (FULL, FULL), "a late copy is counted once"
    served.stack.assert_clean()


def test_nothing_is_loaded_behind_a_late_ticket() -> None:
    served = flooded()
    repeat(served)
    served.advance()
    served.stack.now_s += UNKNOWN_DEADLINE_S
    other = served.stack.submit(prompt(LENGTH, LOST + 1), OUTPUT)
    served.finish(copies=False)
    assert served.cached(other) == 0
    served.finish()
    served.stack.assert_clean()


def test_loads_go_on_after_a_while_as_the_end_of_a_late_one_may_never_be_reported() -> None:
    served = flooded()
    repeat(served)
    served.advance()
    served.stack.now_s += UNKNOWN_DEADLINE_S
    served.finish(copies=False)
    served.stack.now_s += SUSPENDED_S
    other = served.stack.submit(prompt(LENGTH, LOST + 1), OUTPUT)
    served.advance()
    assert [load.is_over for load in loads(served).line] == [True, False]
    served.finish()
    assert served.cached(other) == FULL * SIZE
    served.stack.assert_clean()


def test_the_engine_wakes_when_a_load_is_late() -> None:
    served = flooded()
    repeat(served)
    (load,) = loads(served).line
    load.deadline_at = served.stack.now_s + 0.1
    assert served.stack.engine.wake_at == pytest.approx(load.deadline_at)
    served.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_sleeps_again_after_a_deadline_though_the_runner_takes_no_plan(depth: int) -> None:
    """The runner holds a plan without rows until a copy is done, and with depth 1 gets no other."""
    served = flooded(depth=depth)
    repeat(served)
    served.advance()
    served.stack.now_s += UNKNOWN_DEADLINE_S
    served.stack.step()
    assert served.stack.engine.wake_at > served.stack.now_s
    served.finish()
    served.stack.assert_clean()


@pytest.mark.parametrize("when", ["loading", "loaded"])
def test_a_cancelled_sequence_leaves_no_block_behind(when: str) -> None:
    served = flooded()
    request = repeat(served)
    if when == "loaded":
        served.copy()
    served.stack.front.put(cancel=engine_pb2.Cancel(handle=request.handle))
    served.finish()
    served.stack.assert_clean()
    again = repeat(served)
    served.finish()
    assert served.cached(again) == FULL * SIZE, "what was loaded stays in the cache"


def test_pins_give_way_to_a_running_sequence() -> None:
    """A pin's sequence waits for a slot; the running one needs each block."""
    served = flooded()
    running = served.stack.submit(prompt(SIZE, seed=50), 18 * SIZE)
    other = served.stack.submit(prompt(SIZE, seed=51), 2 * SIZE)
    served.advance(2)
    assert served.scheduler.table.num_running == 2
    pinned = repeat(served)
    served.finish()
    for request in (running, other, pinned):
        served.cached(request)
    assert not served.scheduler.preemptions
    served.stack.assert_clean()


def test_a_flush_drops_copies_and_what_is_being_loaded() -> None:
    served = flooded()
    request = repeat(served)
    served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=1))
    served.finish()
    assert served.cached(request) == 0
    host = tiers(served).host
    assert host.num_ready <= FULL + 1, "only what was computed since"
    served.stack.assert_clean()


def test_a_load_that_computing_beats_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    served = flooded()
    loads(served).times.note(1, 10.0)
    monkeypatch.setattr(StepTimeModel, "known", True)
    monkeypatch.setattr(StepTimeModel, "seconds", lambda self, positions, rows, context, start=0: 0.001 * positions)
    request = repeat(served)
    served.finish()
    assert served.cached(request) == 0 and loads(served).counts.blocks == 0


def prefetched() -> tuple[Service, list[bytes]]:
    """Returns a flooded service that has loaded the lost prefix for no request, and the names of its blocks."""
    served = flooded()
    model, secret = served.scheduler.hello.model, served.stack.engine.pool.secret.value
    root = root_hash(secret, model.weights_version, model.numerics, "", "")
    names = chain_hashes(root, pack(prompt(LENGTH, LOST)[: FULL * SIZE]), SIZE)
    assert tiers(served).prefetch(names) == FULL
    served.stack.engine.pool.wake(served.session)
    served.finish()
    assert served.scheduler.pool.num_ready(names) == FULL
    return served, names


def unused(served: Service) -> tuple[int, int]:
    """Returns the prefetched blocks, and those of them that were lost before their use, as status has them."""
    tier = served.stack.engine.reports.status().totals.host_tier
    return tier.prefetched_blocks, tier.unused_blocks


def test_a_prefetched_prefix_is_hit_at_once() -> None:
    served, _ = prefetched()
    request = repeat(served)
    assert served.scheduler.table.num_running == 1
    served.finish()
    assert served.cached(request) == FULL * SIZE and not loads(served).counts.wasted
    served.stack.assert_clean()


@pytest.mark.parametrize("comes", [False, True])
def test_prefetched_blocks_that_nobody_used_are_counted(comes: bool) -> None:
    served, names = prefetched()
    assert unused(served) == (FULL, 0)
    if comes:
        repeat(served)
        served.finish()
    for seed in range(11, 14):
        served.stack.submit(prompt(LENGTH, seed), OUTPUT)
        served.finish()
    lost = FULL - sum(map(served.scheduler.pool.has, names))
    assert lost > 1 and unused(served) == (FULL, 0 if comes else lost)
    served.stack.assert_clean()


def test_what_is_kept_for_waiting_sequences_keeps_no_other_from_an_idle_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several runners, placement asks for room; what has been loaded for one that waits gives way at admission."""
    served = flooded()
    served.stack.add_runner(HashBackend(num_slots=2, num_blocks=4, block_size=SIZE))
    served.stack.step()
    pool, placement = served.scheduler.pool, served.stack.engine.placement
    with monkeypatch.context() as patch:
        patch.setattr(placement, "place", lambda: None)
        requests = [served.stack.submit(prompt(LENGTH, seed), OUTPUT) for seed in (31, 32)]
        served.stack.step()
    _, later = served.stack.engine.requests.queue.in_order()
    kept = pool.allocate(pool.num_free - 3)
    pool.kept.mark(kept)
    loads(served)._pins[later] = Pin(kept)
    assert loads(served).num_kept == pool.num_blocks - 3
    served.finish()
    assert all(request.streams[0].end is not None for request in requests) and not loads(served).num_pins
