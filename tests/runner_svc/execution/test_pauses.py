"""A runner that was paused for longer than the plan timeout continues: the pause does not count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roster_protos import plan_pb2
from runner_svc.execution.busy_watch import TICK_S, BusyWatch
from tests.support.fake_scheduler import FakeScheduler
from tests.support.plans import SAMPLE, admission, plan

PLAN_TIMEOUT_S, STEP_S, PAUSE_S = 2.0, 1.0, 3.0


def test_a_gap_counts_as_one_tick() -> None:
    watch = BusyWatch(1.0)
    now = 50.0
    for _ in range(9):
        now += TICK_S
        watch.look(50.0, now)
    watch.look(50.0, now + 3600)
    assert not watch.over
    watch.look(50.0, now + 3600 + TICK_S)
    assert watch.over
    watch.look(None, now + 3601)
    assert not watch.over
    watch.look(now + 3601, now + 7200)  # the next plan, with a pause as its first tick
    assert not watch.over


@pytest.mark.parametrize("paused", [True, False])
def test_a_stopped_runner_is_not_taken_for_a_hanging_one(tmp_path: Path, paused: bool) -> None:
    """Without the pause, a plan that takes as long ends the process."""
    scheduler = FakeScheduler(f"ipc://{tmp_path}/link")
    step_s = STEP_S if paused else PLAN_TIMEOUT_S + PAUSE_S
    flags = {
        "link": scheduler.endpoint, "device": "hash", "runner-id": "r", "silence-s": 0.3,
        "plan-timeout-s": PLAN_TIMEOUT_S, "test-backend": json.dumps({"step_ms": step_s * 1000}),
    }  # fmt: skip
    command = [sys.executable, "-m", "runner_svc.main", *(f"--{name}={value}" for name, value in flags.items())]
    with subprocess.Popen(command) as runner:
        try:
            scheduler.welcome()
            scheduler.send(number=1, plan=plan(admissions=[admission(0, [1, 2], [1])], extents=[(0, 0, 2, SAMPLE)]))
            scheduler.send(number=1, ping=plan_pb2.Ping(last_plan=1))
            scheduler.expect("pong")
            if paused:
                os.kill(runner.pid, signal.SIGSTOP)
                time.sleep(PAUSE_S)
                os.kill(runner.pid, signal.SIGCONT)
                assert scheduler.expect("result").number == 1
            else:
                assert runner.wait(20) == 3
        finally:
            runner.kill()
            scheduler.close()
