"""Runners that a scheduler accepts: one per id, with ids made unique on a host, and none with another model."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from roster_protos import plan_pb2
from runner_svc.backends.hash_backend import expected_tokens
from tests.support.linked_stack import LinkedStack
from tests.support.record_frames import ended

HOST = socket.gethostname()


class Machine:
    """A host with runner processes, and their scheduler in this process."""

    def __init__(self, folder: Path) -> None:
        self.stack = LinkedStack()
        self._folder = folder
        self._begin_s = time.monotonic()
        self.runners: list[subprocess.Popen[str]] = []

    def start(self, *, vocab_size: int = 259, **flags: object) -> subprocess.Popen[str]:
        """Starts a runner that has these settings besides the usual ones."""
        test_backend = {"step_ms": 5, "eos_probability": 0, "vocab_size": vocab_size}
        settings = {
            "link": self.stack.endpoint, "device": "hash", "slots": 4, "cache-dir": self._folder,
            "test-backend": json.dumps(test_backend), **flags,
        }  # fmt: skip
        command = [sys.executable, "-m", "runner_svc.main", *(f"--{name}={value}" for name, value in settings.items())]
        self.runners.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return self.runners[-1]

    @property
    def ids(self) -> list[str]:
        """Ids of the connected runners."""
        return sorted(scheduler.hello.runner_id for scheduler in self.stack.engine.pool.schedulers.values())

    def tick(self) -> None:
        """Advances the scheduler's clock to real time."""
        self.stack.now_s = time.monotonic() - self._begin_s

    def close(self) -> None:
        """Ends all processes."""
        for runner in self.runners:
            runner.kill()
            runner.communicate()
        self.stack.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def test_taken_ids_and_unlike_runners_are_refused(machine: Machine) -> None:
    stack = machine.stack
    first = machine.start()
    stack.step_until(lambda: machine.ids == [HOST], machine.tick)
    machine.start()
    stack.step_until(lambda: machine.ids == [HOST, f"{HOST}-2"], machine.tick)
    sampling = plan_pb2.Sampling(top_p=1, repetition_penalty=1)
    requests = [stack.submit([number], 150, sampling=sampling) for number in range(12)]
    refused = {
        "another live runner has the id": machine.start(**{"runner-id": HOST}),
        "has 300 tokens": machine.start(vocab_size=300),
    }
    with structlog.testing.capture_logs() as logs:
        stack.step_until(lambda: all(runner.poll() is not None for runner in refused.values()), machine.tick)
    reasons = [entry["reason"] for entry in logs if entry["event"] == "a runner is refused"]
    for says, runner in refused.items():
        (reason,) = [one for one in reasons if says in one]
        assert runner.stderr is not None and runner.returncode == 1 and reason in runner.stderr.read()
    assert "--runner-id" in "".join(reasons)
    stack.step_until(lambda: ended(requests), machine.tick)
    for number, request in enumerate(requests):
        assert request.streams[0].tokens == expected_tokens([number], 150, eos_probability=0)
    assert not any(stack.engine.requests.totals.losses.values()), "a connected runner was given up"
    first.send_signal(signal.SIGKILL)
    first.wait()
    machine.start()
    stack.step_until(lambda: stack.engine.requests.totals.losses.total() and len(machine.ids) == 2, machine.tick)
    assert machine.ids == [HOST, f"{HOST}-2"], "a restart keeps its id"
