"""How the engine waits: to the microsecond, and polling only where a core is free and a result is near."""

from __future__ import annotations

import math
import os
import statistics
import time
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.engine import engine_wait
from scheduler_svc.engine.engine_wait import EngineWait, FreeCore
from scheduler_svc.metrics.step_phases import StepPhases
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


def waiting(monkeypatch: pytest.MonkeyPatch, cores: float, result_in_s: float, **settings: Any) -> EngineWait:
    """Returns the wait of an engine with one runner, whose next result is predicted in `result_in_s`."""
    monkeypatch.setattr(engine_wait, "usable_cores", lambda: cores)
    pool = SimpleNamespace(schedulers={1: None}, computes=True, next_result_at=time.monotonic() + result_in_s)
    return EngineWait(SchedulerSettings(**settings), pool, StepPhases())  # type: ignore[arg-type]


def polled_s(wait: EngineWait) -> float:
    return wait._phases.poll_s


def test_a_wait_ends_within_a_fraction_of_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = waiting(monkeypatch, 2, math.inf)
    least_s = math.inf
    for _ in range(300):  # on a busy machine, most are late
        until_at = time.monotonic() + 0.0023
        wait.until(until_at)
        late_s = time.monotonic() - until_at
        assert late_s >= 0
        least_s = min(least_s, late_s)
        if least_s < 0.0005:
            break
    assert least_s < 0.0005, "ZeroMQ alone would wait for whole milliseconds, 0.7 ms longer"
    assert polled_s(wait) == 0
    wait.close()


def test_input_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    for cores, result_in_s in ((2, math.inf), (16, 0.0), (16, 0.01)):
        wait = waiting(monkeypatch, cores, result_in_s)
        wait.watch(reader)
        os.write(writer, b"!")
        begin_s = time.monotonic()
        wait.until(begin_s + 20)
        assert time.monotonic() - begin_s < 10
        os.read(reader, 1)
        wait.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("cores", "result_in_s", "settings", "most_s"),
    [
        (16, 0.02, {}, 0.0007),
        (16, 0.02, {"profile": "latency"}, 0.002),
        (16, math.inf, {}, 0.0),
        (16, 0.02, {"profile": "quiet"}, 0.0),
        (16, 0.02, {"busy_poll_us": 0}, 0.0),
        (3, 0.02, {}, 0.0),
        (16, 0.02, {"front_workers": 14}, 0.0),
    ],
    ids=str,
)
def test_it_polls_only_near_a_result(
    monkeypatch: pytest.MonkeyPatch, cores: float, result_in_s: float, settings: dict[str, Any], most_s: float
) -> None:
    polled = []
    for _ in range(200):  # on a busy machine, a sleep may end after the result
        wait = waiting(monkeypatch, cores, result_in_s, **settings)
        wait.until(time.monotonic() + 0.03)
        wait.close()
        polled.append(polled_s(wait))
        if len(polled) > 2 and (any(polled) or not most_s):
            break
    assert any(polled) == bool(most_s)
    assert min((seconds for seconds in polled if seconds), default=0.0) <= most_s + 0.005


def test_a_given_time_is_polled_for_while_a_runner_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = waiting(monkeypatch, 1, math.inf, busy_poll_us=5000)
    wait.until(time.monotonic() + 0.02)
    assert polled_s(wait) >= 0.005
    wait.close()


def test_polling_pauses_while_no_core_is_free() -> None:
    core, now_s = FreeCore(), 0.0
    pauses_s = []
    for _ in range(4):
        core.polled(now_s, 0.02, 0.01)
        paused_at = now_s
        while not core.now(now_s):
            now_s += 0.1
        pauses_s.append(round(now_s - paused_at))
    assert pauses_s == [1, 2, 4, 8]
    for _ in range(2000):
        core.polled(now_s, 0.02, 0.02)
        assert core.now(now_s)
    core.polled(now_s, 0.02, 0.01)
    assert not core.now(now_s) and core.now(now_s + 1.1)
    assert statistics.mean(pauses_s) < engine_wait._LONGEST_PAUSE_S
