"""The pacer: no wait without load, the configured rate under load, and bounded waits."""

from __future__ import annotations

import asyncio
import random

import pytest

from scheduler_svc.front import worker
from scheduler_svc.front.rpc.pacing import BURST_MESSAGES, FASTEST, MESSAGES_PER_SECOND, FlushGate, MessagePacer
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


def test_few_streams_never_wait() -> None:
    pacer = MessagePacer(0.03, workers=1)
    for step in range(1, 1000):
        now = step * 0.007
        assert all(pacer.reserve(now) == now for _ in range(BURST_MESSAGES))


@pytest.mark.parametrize("streams", [64, 128])
def test_many_streams_in_step_are_spread_at_the_rate(streams: int) -> None:
    """Each stream reserves again at the first step after its last message, as a FlushGate does."""
    pacer = MessagePacer(0.03, workers=1)
    due = [0.0] * streams
    sent = []
    now = 0.0
    while now < 5:
        now += 0.0073
        for stream in range(streams):
            if due[stream] <= now:
                sent.append(due[stream])
                due[stream] = pacer.reserve(now)
                assert now <= due[stream] <= now + 0.03 + 1e-9
    assert len(sent) / 5 < MESSAGES_PER_SECOND * 1.05
    assert len(sent) / 5 > streams / (0.03 + 0.0073 * 2)


@pytest.mark.parametrize("cost_s, rate", [(10e-6, FASTEST), (100e-6, 6_000), (1e-3, MESSAGES_PER_SECOND)])
def test_the_rate_follows_the_load_of_the_thread(cost_s: float, rate: float) -> None:
    """The thread may use 60% of a core, at `cost_s` per message; at most one core is offered to it."""
    now, ran_s = 0.0, 0.0
    pacer = MessagePacer(0.03, workers=1, most_load=0.6, thread_time=lambda: ran_s)
    written: list[float] = []
    for _ in range(30_000):
        now = max(now, pacer.reserve(now)) + cost_s
        ran_s += cost_s
        written.append(now)
    recent = sum(at > now - 1 for at in written)
    assert min(rate, 1 / cost_s) * 0.7 <= pacer.rate <= rate * 1.3
    assert cost_s == 1e-3 or recent * cost_s <= 0.75


def test_without_a_core_of_its_own_a_worker_keeps_the_fixed_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers, rate in ((16.0, 1, FASTEST), (3.5, 1, MESSAGES_PER_SECOND), (16.0, 0, MESSAGES_PER_SECOND)):
        monkeypatch.setattr(worker, "usable_cores", lambda cores=cores: cores)
        assert worker._pacer(SchedulerSettings(front_workers=workers)).rate == pytest.approx(rate)
    assert worker._pacer(SchedulerSettings(profile="quiet")).rate == pytest.approx(MESSAGES_PER_SECOND)
    assert worker._pacer(SchedulerSettings(flush_ms=2, front_workers=2)).rate == pytest.approx(MESSAGES_PER_SECOND / 2)


def test_the_longest_wait_holds_whatever_the_load() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    pacer = MessagePacer(0.03, workers=4)
    now = 0.0
    for _ in range(20_000):
        now += generator.expovariate(50_000)
        assert now <= pacer.reserve(now, weight=generator.uniform(1, 5)) <= now + 0.03 + 1e-9
    assert pacer.reserve(now + 1) == now + 1


async def test_a_gate_merges_what_comes_while_it_is_shut() -> None:
    pacer = MessagePacer(0.05, workers=1)
    gate = FlushGate(pacer)
    loop = asyncio.get_running_loop()
    gate.notify()
    await asyncio.wait_for(gate.wait(), 1)
    for _ in range(1000):
        pacer.reserve(loop.time())
    start = loop.time()
    gate.notify()
    gate.notify()
    await asyncio.wait_for(gate.wait(), 1)
    assert 0.03 < loop.time() - start < 0.5
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.wait(), 0.1)


async def test_an_urgent_notice_opens_a_gate_that_waits_for_its_turn() -> None:
    pacer = MessagePacer(1.0, workers=1)
    gate = FlushGate(pacer)
    loop = asyncio.get_running_loop()
    for _ in range(20_000):
        pacer.reserve(loop.time())
    waiting = asyncio.create_task(gate.wait())
    await asyncio.sleep(0)
    gate.notify()
    await asyncio.sleep(0.02)
    assert not waiting.done()
    gate.notify(urgent=True)
    await asyncio.wait_for(waiting, 0.2)
