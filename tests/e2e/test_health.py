"""Health reports stopped processes: liveness, readiness, hangs of the engine and of the runner."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from roster_client.client.sync_client import SyncRosterClient
from tests.support.processes import RosterProcesses, roster_processes

LIVENESS, READINESS, ENGINE, RUNNER = "", "roster.v1.InferenceService", "roster.engine", "roster.runner"
SERVICES = (LIVENESS, READINESS, ENGINE, RUNNER)
STALL_S = 1.0
PATIENCE_S = 60.0


class Watches:
    """One Watch call per health service, each read by a thread."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        stub = health_pb2_grpc.HealthStub(self._channel)
        self.seen: dict[str, list[str]] = {service: [] for service in SERVICES}
        self._calls = {
            service: stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)
            for service in SERVICES
        }
        self._threads = [threading.Thread(target=self._read, args=(service,)) for service in SERVICES]
        for thread in self._threads:
            thread.start()

    def _read(self, service: str) -> None:
        try:
            for answer in self._calls[service]:
                self.seen[service].append(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
        except grpc.RpcError:
            pass  # the call has ended

    def wait(self, **states: bool) -> None:
        """Waits until the last status of each service named (by its constant) is SERVING (True) or NOT_SERVING."""
        expected = {globals()[name]: "SERVING" if serving else "NOT_SERVING" for name, serving in states.items()}
        deadline = time.monotonic() + PATIENCE_S
        while any(self.seen[service][-1:] != [state] for service, state in expected.items()):
            assert time.monotonic() < deadline, f"expected {expected}, saw {self.seen}"
            time.sleep(0.02)

    def close(self) -> None:
        for call in self._calls.values():
            call.cancel()
        for thread in self._threads:
            thread.join()
        self._channel.close()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops the process inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    scheduler = {"stall_s": STALL_S, "runner_timeout_s": 30, "plan_timeout_s": 60}
    runner = {"device": "hash", "test_backend": {"step_ms": 20, "eos_probability": 0}}
    with roster_processes(tmp_path_factory.mktemp("health"), scheduler=scheduler, runner=runner) as processes:
        yield processes


@pytest.fixture
def watches(roster: RosterProcesses) -> Iterator[Watches]:
    watches = Watches(roster.address)
    try:
        watches.wait(LIVENESS=True, READINESS=True, ENGINE=True, RUNNER=True)
        yield watches
    finally:
        watches.close()


def test_a_stopped_engine_is_reported_until_it_resumes(roster: RosterProcesses, watches: Watches) -> None:
    with stopped(roster.pid("scheduler")):
        watches.wait(LIVENESS=True, READINESS=False, ENGINE=False)
    watches.wait(LIVENESS=True, READINESS=True, ENGINE=True, RUNNER=True)
    assert set(watches.seen[LIVENESS]) == {"SERVING"}
    with SyncRosterClient(roster.address) as client:
        assert client.generate("after it", raw=True, max_tokens=3, deadline_s=20).completion().choices[0].token_ids


def test_a_stopped_runner_is_reported_while_a_plan_waits(roster: RosterProcesses, watches: Watches) -> None:
    with SyncRosterClient(roster.address) as client:
        stream = client.generate("a stream", raw=True, max_tokens=50, temperature=0)
        next(iter(stream))
        with stopped(roster.pid("runner")):
            watches.wait(RUNNER=False, READINESS=False)
            # Only the runner hangs: new requests queue, and the engine and this front worker answer.
            watches.wait(LIVENESS=True, ENGINE=True)
        watches.wait(RUNNER=True, READINESS=True)
        assert len(stream.completion().choices[0].token_ids) == 50


def test_a_front_worker_that_was_stopped_reports_no_hang(roster: RosterProcesses, watches: Watches) -> None:
    (worker,) = roster.children("scheduler")
    seen = len(watches.seen[ENGINE])
    with stopped(worker):
        time.sleep(2 * STALL_S)
    time.sleep(STALL_S)
    assert len(watches.seen[ENGINE]) == seen


def test_an_unknown_service_is_not_found(roster: RosterProcesses) -> None:
    with grpc.insecure_channel(roster.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nonsense"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_without_a_runner_only_readiness_fails(tmp_path: Path) -> None:
    processes = RosterProcesses(tmp_path, scheduler={"stall_s": STALL_S}, runner={"device": "hash"})
    processes.start_one("scheduler")
    watches = Watches(processes.address)
    try:
        watches.wait(LIVENESS=True, READINESS=False, ENGINE=True, RUNNER=False)
        processes.start_one("runner")
        watches.wait(READINESS=True, RUNNER=True)
    finally:
        watches.close()
        processes.stop()


def test_a_watcher_that_leaves_or_does_not_read_delays_no_other(roster: RosterProcesses, watches: Watches) -> None:
    leaving = Watches(roster.address)
    leaving.wait(ENGINE=True)
    leaving.close()
    with grpc.insecure_channel(roster.address) as channel:
        lazy = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=ENGINE))
        with stopped(roster.pid("scheduler")):
            watches.wait(ENGINE=False, READINESS=False)
        watches.wait(ENGINE=True, READINESS=True)
        lazy.cancel()
