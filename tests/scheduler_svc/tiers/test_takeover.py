"""What a runner's host pool keeps over sessions and schedulers, and which of them may use it."""

from __future__ import annotations

import numpy as np
import pytest
from structlog.testing import capture_logs

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.link.runner_events import GotSnapshot, Loss
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.tiers.offloads import Content
from scheduler_svc.tiers.tiers import Tiers
from tests.scheduler_svc.tiers.test_loads import FULL, LENGTH, LOST, flooded, repeat
from tests.support.sharing import OUTPUT, SIZE, Service, prompt


def of_now(served: Service) -> Service:
    """Returns the service in its present session."""
    (session,) = served.stack.engine.pool.schedulers
    return Service(served.stack, session, served.copier)


def tiers(served: Service) -> Tiers:
    found = of_now(served).scheduler.tiers
    assert found is not None
    return found


def secret_of(served: Service) -> bytes:
    return served.stack.engine.pool.secret.value


def test_a_successor_that_hears_the_secret_loads_what_its_predecessor_offloaded() -> None:
    served = flooded()
    ready, secret = tiers(served).host.num_ready, secret_of(served)
    served.stack.restart_scheduler()
    assert secret_of(served) == secret and tiers(served).host.num_ready == ready > 2 * FULL
    served = of_now(served)
    request = repeat(served)
    served.finish()
    assert served.cached(request) == FULL * SIZE
    served.stack.assert_clean()


class _Secretive:
    """Keeps every secret."""

    def random(self) -> float:
        return 1.0


def test_without_the_secret_the_host_pool_is_emptied_with_a_warning() -> None:
    served = flooded()
    secret = secret_of(served)
    served.stack.runners.secretive = _Secretive()  # type: ignore[assignment]
    with capture_logs() as logs:
        served.stack.restart_scheduler()
    assert any(line["log_level"] == "warning" and "host pool" in line["event"] for line in logs)
    assert secret_of(served) != secret and tiers(served).host.num_ready == 0 and tiers(served).is_open
    served = of_now(served)
    request = repeat(served)
    served.finish()
    assert served.cached(request) == 0
    served.stack.assert_clean()


def test_a_successor_does_not_find_what_a_conversation_was_forgotten_of() -> None:
    served = flooded()
    served.stack.submit(prompt(LENGTH, 70), OUTPUT, conversation_id="x")
    served.finish()
    names = served.scheduler.pool.tree.names(served.scheduler.pool.tree.find("", "x"))
    for seed in range(71, 75):  # so that its blocks leave the cache
        served.stack.submit(prompt(LENGTH, seed), OUTPUT)
        served.finish()
    copied = [name for name in names if tiers(served).host.is_ready(name)]
    assert copied and not any(map(served.scheduler.pool.has, copied))
    kept = tiers(served).host.num_ready - len(copied)
    served.stack.front.put(forget=engine_pb2.Forget(handle=9, conversation_id="x"))
    served.stack.step()
    served.advance()
    served.stack.restart_scheduler()
    found = tiers(served).host
    assert not any(map(found.has, names)) and found.num_ready == kept > 0
    served.stack.assert_clean()


def test_what_is_forgotten_while_it_is_prefetched_is_nowhere() -> None:
    served = flooded()
    served.stack.submit(prompt(LENGTH, 70), OUTPUT, conversation_id="x")
    served.finish()
    pool = served.scheduler.pool
    names = pool.tree.names(pool.tree.find("", "x"))[::-1]
    for seed in range(71, 75):  # so that its blocks leave the cache
        served.stack.submit(prompt(LENGTH, seed), OUTPUT)
        served.finish()
    assert tiers(served).prefetch(names)
    served.stack.engine.pool.wake(served.session)
    served.stack.step()
    assert tiers(served).loads.line.in_flight
    served.stack.front.put(forget=engine_pb2.Forget(handle=9, conversation_id="x"))
    served.finish()
    assert not tiers(served).loads.line
    assert not any(map(pool.has, names)) and not any(map(tiers(served).host.has, names))
    served.stack.assert_clean()


def test_a_successor_does_not_find_what_was_flushed_not_even_copies_under_way() -> None:
    served = flooded()
    served.stack.submit(prompt(2 * LENGTH, 80), OUTPUT)
    served.advance(2)
    line = tiers(served).offloads.line
    assert line.in_flight
    served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=9))
    served.finish()
    assert not line
    served.stack.restart_scheduler()
    assert tiers(served).host.num_ready == 0 and tiers(served).is_open
    served.stack.assert_clean()


@pytest.mark.parametrize("holds", [False, True])
def test_what_is_flushed_before_a_runner_has_said_what_it_keeps_does_not_come_back(holds: bool) -> None:
    served = flooded()
    runner = served.stack.runners.kill(served.session, Loss.SILENT)
    served.stack.step()
    served.stack.runners.connect(99, runner, former=served.session, holds=holds)
    served.stack.front.put(flush_prefixes=engine_pb2.FlushPrefixes(handle=9))
    served.stack.step()  # the runner joins before the flush
    served.stack.step()
    assert tiers(served).is_open and tiers(served).host.num_ready == 0
    of_now(served).finish()
    served.stack.restart_scheduler()
    assert tiers(served).is_open and tiers(served).host.num_ready == 0
    served.stack.assert_clean()


@pytest.mark.parametrize("connected", [False, True])
def test_what_is_flushed_while_a_runner_is_lost_does_not_come_back(connected: bool) -> None:
    """`connected`: it is lost between the flush and the plan that says it."""
    served = flooded()
    flush = engine_pb2.FlushPrefixes(handle=9)
    if connected:
        served.stack.front.put(flush_prefixes=flush)
        served.stack.step()
        served.stack.step()
        assert served.scheduler.in_flight
    runner = served.stack.runners.kill(served.session, Loss.SILENT)
    served.stack.step()
    if not connected:
        served.stack.front.put(flush_prefixes=flush)
        served.stack.step()
    served.stack.runners.connect(99, runner, former=served.session, holds=True)
    served.stack.step()
    served.stack.step()
    assert tiers(served).is_open and tiers(served).host.num_ready == 0
    served = of_now(served)
    for seed in range(1, 9):
        served.stack.submit(prompt(LENGTH, seed), OUTPUT)
        served.finish()
    ready = tiers(served).host.num_ready
    runner = served.stack.runners.kill(served.session, Loss.SILENT)
    served.stack.runners.connect(100, runner, former=served.session)
    served.stack.step()
    served.stack.step()
    assert tiers(served).host.num_ready == ready > 0, "copies made since are kept"
    served.stack.assert_clean()


def test_no_successor_finds_what_a_runner_had_copied_before_it_was_on_probation() -> None:
    served = flooded()
    served.stack.submit(prompt(LENGTH, 80), OUTPUT)
    served.stack.step()
    runner = served.stack.runners.kill(served.session, Loss.FAULT)
    served.stack.step()
    served.stack.runners.connect(99, runner, former=served.session)
    Service(served.stack, 99, served.copier).finish()
    assert list(served.stack.engine.pool.schedulers) == [99]
    known = set(tiers(served).host.all_names())
    served.stack.restart_scheduler()
    assert tiers(served).is_open and set(tiers(served).host.all_names()) <= known
    served.stack.assert_clean()


def test_a_copy_that_is_forgotten_before_its_plan_is_sent_has_no_name() -> None:
    served = flooded()
    offloads, host = tiers(served).offloads, tiers(served).host
    block, name = next(iter(served.scheduler.pool.upcoming(1)))
    host.forget(name)
    offloads.begin([Content(block, name, SIZE)])
    tiers(served).purge([name])
    plan = plan_pb2.Plan()
    tiers(served).start(7, plan)
    assert plan.offload_targets == plan.purged_host_blocks[-4:] and plan.offload_tags == bytes(20)


def test_the_running_sequences_go_on_while_the_successor_uses_the_host_pool() -> None:
    served = flooded()
    running = served.stack.submit(prompt(LENGTH, 70), 4 * SIZE)
    served.advance(3)
    served.stack.restart_scheduler()
    served = of_now(served)
    request = repeat(served)
    served.finish()
    assert served.cached(request) == FULL * SIZE
    served.cached(running)
    assert served.stack.engine.requests.totals.adopted == 1
    served.stack.assert_clean()


def test_a_runner_that_comes_back_to_its_scheduler_has_kept_its_host_pool() -> None:
    served = flooded()
    ready = tiers(served).host.num_ready
    runner = served.stack.runners.kill(served.session, Loss.SILENT)
    served.stack.step()
    served.stack.runners.connect(99, runner, former=served.session)
    served.stack.step()
    assert not tiers(served).is_open, "what it has kept is not known yet"
    served.stack.step()
    assert tiers(served).host.num_ready == ready
    served = of_now(served)
    request = repeat(served)
    served.finish()
    assert served.cached(request) == FULL * SIZE
    served.stack.assert_clean()


def test_a_session_that_ends_in_mid_copy_keeps_only_what_was_confirmed_by_the_runner() -> None:
    """An offload that had not ended may have copied a part: its block holds nothing."""
    served = flooded()
    served.stack.submit(prompt(2 * LENGTH, 80), OUTPUT)
    served.advance(2)
    in_flight = sum(len(offload.targets) for offload in tiers(served).offloads.line.in_flight)
    assert in_flight
    ready = tiers(served).host.num_ready
    runner = served.stack.runners.kill(served.session, Loss.SILENT)
    served.copy()
    served.stack.step()
    served.stack.runners.connect(99, runner, former=served.session)
    served.stack.step()
    served.stack.step()
    kept = tiers(served).host.num_ready
    assert ready <= kept <= ready + in_flight
    served = of_now(served)
    again = served.stack.submit(prompt(LENGTH, LOST + 1), OUTPUT)
    served.finish()
    served.cached(again)
    served.stack.assert_clean()


def test_a_runner_with_two_host_pools_names_has_the_first_ones_secret() -> None:
    """Two runners were served by different schedulers: their common successor can use only one's names."""
    first, second = flooded(), flooded()
    runner = second.stack.runners.kill(second.session, Loss.SILENT)
    assert runner.naming_secret not in (b"", secret_of(first))
    with capture_logs() as logs:
        first.stack.runners.connect(77, runner, former=second.session, holds=True)
        first.stack.step()
        first.stack.step()
    assert any("other names" in line["event"] for line in logs)
    other = first.stack.engine.pool.schedulers[77].tiers
    assert other is not None and other.is_open and other.host.num_ready == 0


@pytest.mark.parametrize(
    "snapshot",
    [
        plan_pb2.Snapshot(host_blocks=pack([1]), host_tags=bytes(19)),
        plan_pb2.Snapshot(host_blocks=pack([1, 1]), host_tags=bytes(40)),
        plan_pb2.Snapshot(host_blocks=pack([65]), host_tags=bytes(20)),
        plan_pb2.Snapshot(host_blocks=pack([0]), host_tags=bytes(20)),
    ],
)
def test_a_runner_with_an_impossible_host_pool_is_dropped(snapshot: plan_pb2.Snapshot) -> None:
    served = flooded(host_blocks=64)
    runner = served.stack.runners.kill(served.session, Loss.SILENT)
    served.stack.step()
    served.stack.runners.connect(99, runner, former=served.session)
    served.stack.step()
    served.stack.runners.events = [GotSnapshot(99, snapshot)]
    served.stack.runners.garbled.add(99)
    served.stack.step()
    assert 99 not in served.stack.runners.runners


def test_tags_have_the_name_and_the_number_of_tokens() -> None:
    served = flooded()
    names = tiers(served).host._block_of
    plans: list[plan_pb2.Plan] = []
    send = served.stack.runners.send_plan

    def record(session: int, number: int, plan: plan_pb2.Plan) -> None:
        plans.append(plan)
        send(session, number, plan)

    served.stack.runners.send_plan = record  # type: ignore[method-assign]
    for seed in range(60, 64):
        served.stack.submit(prompt(LENGTH, seed), OUTPUT)
        served.finish()
    offloads = [plan for plan in plans if plan.offload_counts]
    assert offloads
    for plan in offloads:
        tags = np.frombuffer(plan.offload_tags, np.uint8).reshape(-1, 20)
        blocks = np.frombuffer(plan.offload_targets, "<i4").tolist()
        assert [names[tag[:16].tobytes()] for tag in tags] == blocks
        assert (tags[:, 16:].copy().view("<u4") == SIZE).all()
