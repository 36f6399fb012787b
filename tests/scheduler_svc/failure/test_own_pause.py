"""After a pause of its own process, the scheduler ends nothing that timed out because nothing could arrive."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from roster_client.client import RosterClient
from roster_client.client.events import Delta
from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import HashBackend, expected_tokens
from scheduler_svc.engine.engine_loop import EngineLoop
from scheduler_svc.failure.own_pause import forgive
from scheduler_svc.link.runner_link import PAUSE_S as LEAST_PAUSE_S
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.in_process import Stack
from tests.support.lockstep import advance, advance_until_idle
from tests.support.processes import RosterProcesses
from tests.support.thoroughness import FULL

PAUSE_S = 60.0
LOOP_PAUSE_S = LEAST_PAUSE_S + 0.2


def test_runners_clients_and_plans_get_the_time_again() -> None:
    """Timeouts within the pause are extended by it; a deadline is a promise, and passes."""
    stack = Stack(no_runner_s=5, attach_s=5, stall_s=5)
    stack.add_runner(HashBackend())
    sampling = plan_pb2.Sampling(top_p=1, repetition_penalty=1)
    kept = stack.submit([1, 2], 90, sampling=sampling, keep_ms=5000)
    late = stack.submit([3], 90, sampling=sampling, timeout_ms=30_000)
    stack.step()
    stack.front.put(disconnect={"handle": kept.handle})
    stack.step()
    session = next(iter(stack.engine.pool.schedulers))
    stack.now_s += PAUSE_S
    forgive(stack.engine.lifecycle, stack.engine.requests, stack.engine.pool, PAUSE_S)
    stack.step()
    assert stack.engine.pool.progress(stack.now_s)
    assert late.streams[0].end is not None and kept.streams[0].end is None
    stack.runners.kill(session)
    stack.step()
    stack.now_s += 4
    forgive(stack.engine.lifecycle, stack.engine.requests, stack.engine.pool, 0.0)
    stack.now_s += PAUSE_S
    forgive(stack.engine.lifecycle, stack.engine.requests, stack.engine.pool, PAUSE_S)
    stack.step()
    assert kept.streams[0].end is None, "there was no runner for 4 s, not for 64"
    stack.add_runner(HashBackend())
    stack.attach(kept)
    advance(stack, 2)
    advance_until_idle(stack)
    assert len(kept.streams[0].tokens) == 90


def test_the_loop_notices_its_own_pause(tmp_path: Path) -> None:
    """A turn of the loop that takes as long is indistinguishable from within the process."""
    settings = SchedulerSettings(link="tcp://127.0.0.1:*", metrics_listen="", no_runner_s=60)
    loop = EngineLoop(settings, f"ipc://{tmp_path}/engine")
    step, since_at = loop.engine.step, loop.engine.lifecycle.alone_since_at
    pauses = iter([LOOP_PAUSE_S])

    def stopped() -> None:
        time.sleep(next(pauses, 0.0))
        step()

    loop.engine.step = stopped  # type: ignore[method-assign]
    engine = threading.Thread(target=loop.run)
    engine.start()
    try:
        deadline = time.monotonic() + 20
        while loop.engine.lifecycle.alone_since_at == since_at and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        loop.stop()
        engine.join()
        loop.close()
    put_off_s = loop.engine.lifecycle.alone_since_at
    assert since_at is not None and put_off_s is not None and put_off_s - since_at >= LOOP_PAUSE_S


@pytest.mark.skipif(not FULL, reason="three processes for what the two tests above show")
async def test_a_stopped_scheduler_does_not_give_up_waiting_for_a_runner(tmp_path: Path) -> None:
    runner = {"device": "hash", "test_backend": {"eos_probability": 0, "step_ms": 10}}
    with RosterProcesses(tmp_path, scheduler={"no_runner_s": 3.0}, runner=runner) as roster:
        async with RosterClient(roster.address) as client:
            stream = client.generate([7, 8], max_tokens=400, ignore_eos=True, temperature=0.0)
            tokens: list[int] = []
            stopped = False
            async for event in stream:
                tokens += event.token_ids if isinstance(event, Delta) else []
                if tokens and not stopped:
                    stopped = True
                    os.kill(roster.pid("runner"), signal.SIGKILL)
                    while "a runner is lost" not in roster.logs():  # bounded by pytest's timeout
                        await asyncio.sleep(0.02)
                    os.kill(roster.pid("scheduler"), signal.SIGSTOP)
                    roster.start_one("runner")
                    await asyncio.sleep(4.0)
                    while roster.logs().count("] ready ") < 2:
                        await asyncio.sleep(0.05)
                    os.kill(roster.pid("scheduler"), signal.SIGCONT)
            assert tokens == expected_tokens([7, 8], 400, eos_probability=0)
