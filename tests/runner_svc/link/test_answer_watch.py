"""A runner that no scheduler answers says so again and again, and its health service knows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from roster_client.client.health import check_health
from roster_client.client.sync_client import SyncRosterClient
from roster_client.serve.free_ports import free_ports
from roster_common.setting_sources import UnusableSettings
from runner_svc.execution.runner import Runner
from runner_svc.link import answer_watch
from runner_svc.link.answer_watch import AnswerWatch
from runner_svc.link.health import RunnerHealth
from runner_svc.link.plan_socket import PlanSocket
from tests.support.fake_scheduler import FakeScheduler
from tests.support.spy_backend import SpyBackend


def test_the_warning_repeats_and_the_state_changes() -> None:
    watch, states = AnswerWatch("tcp://10.0.0.1:50063"), []
    watch.on_change = states.append
    with capture_logs() as logs:
        for now in (0.0, 4.9, 5.0, 5.1, 34.9, 35.0, 65.0):
            watch.missing(now, connected=now > 50)
    assert [line["seconds"] for line in logs] == [5, 35, 65]
    assert all(line["log_level"] == "warning" and line["link"] == "tcp://10.0.0.1:50063" for line in logs)
    assert "start the scheduler" in logs[0]["advice"] and "another program" in logs[2]["advice"]
    assert states == []
    watch.heard()
    watch.heard()
    with capture_logs() as logs:
        watch.missing(100.0, connected=True)
        watch.heard()  # within 5 s: a reconnection is no news
        watch.missing(101.0, connected=True)
        assert logs == [] and states == [True]
        watch.missing(106.0, connected=True)
    assert len(logs) == 1 and states == [True, False]


def test_the_health_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_watch, "FIRST_WARNING_S", 0.3)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    health = RunnerHealth.open(address)
    link = PlanSocket(Runner(SpyBackend(), "spy"), f"ipc://{tmp_path}/link", silence_s=0.3)
    changed = threading.Semaphore(0)

    def tell(serves: bool) -> None:
        health.tell(serves)
        changed.release()

    link.answers.on_change = tell
    thread = threading.Thread(target=link.run)
    try:
        with SyncRosterClient(address) as client:

            def state(service: str) -> str:
                return check_health(client.channel, 5, service)

            assert (state(""), state("roster.runner")) == ("SERVING", "NOT_SERVING")
            scheduler = FakeScheduler(f"ipc://{tmp_path}/link")
            thread.start()
            scheduler.welcome()
            assert changed.acquire(timeout=20) and state("roster.runner") == "SERVING"
            scheduler.close()
            assert changed.acquire(timeout=20) and state("roster.runner") == "NOT_SERVING"
    finally:
        link.stop()
        thread.join(20)
        health.close()


@pytest.mark.parametrize("listen", ["nowhere", "::1:50066", "127.0.0.1:99999"])
def test_addresses_that_can_not_be_used(listen: str) -> None:
    with pytest.raises(UnusableSettings, match=r"^health_listen is '.*', which can't be listened on: "):
        RunnerHealth.open(listen)


def test_an_address_in_use() -> None:
    health = RunnerHealth.open(address := f"127.0.0.1:{free_ports(1)[0]}")
    try:
        with pytest.raises(UnusableSettings, match="Address already in use"):
            RunnerHealth.open(address)
    finally:
        health.close()
