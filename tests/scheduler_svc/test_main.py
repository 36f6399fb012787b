"""The process of `roster-scheduler`: refusals, drain, and the restart of a dead front worker."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from roster_client.client.errors import RosterError, UnavailableError
from roster_client.client.events import Delta, Finish, FinishReason
from roster_client.client.sync_client import SyncRosterClient
from tests.support.in_this_process import run_scheduler
from tests.support.processes import RosterProcesses

SLOW = {"device": "hash", "test_backend": {"step_ms": 40, "eos_probability": 0}}


ANYWHERE = ("--listen=127.0.0.1:0", "--admin-listen=", "--metrics-listen=", "--link=tcp://127.0.0.1:*")


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--policy=fcsf", "there is no policy 'fcsf'; installed are: adaptive, "),
        ('--policy-parameters={"tokens": 3}', "It knows: victim, step_tokens"),
        ("--depth=9", "roster-scheduler: setting depth: Input should be less than or equal to 3"),
        ("--tls-cert=a.pem", "roster-scheduler: tls_cert and tls_key belong together: set both, or neither"),
        ("--listen=nowhere", "is not an address"),
        ("--listen=192.0.2.1:50061", "Cannot assign requested address; set another address\n"),
        ("--tokens=/nope", "the token file /nope can't be read: No such file or directory\n"),
        ("--link=tcp://127.0.0.1:99999", "setting link: 'tcp://127.0.0.1:99999' is not an address: a port is at most"),
        ("--otlp-endpoint=http://host:99999", "setting otlp_endpoint: 'host:99999' is not an address: a port is at "),
        ("--metrics-listen=127.0.0.1:65536", "setting metrics_listen: '127.0.0.1:65536' is not an address"),
    ],
)
def test_settings_that_can_not_be_used_are_told_in_a_sentence(flag: str, sentence: str) -> None:
    ended = run_scheduler(*ANYWHERE, flag)
    assert ended.returncode == 2
    assert sentence in ended.stderr and "Traceback" not in ended.stderr


def test_the_process_tells_it_and_ends() -> None:
    command = [sys.executable, "-m", "scheduler_svc.main", *ANYWHERE, "--link=nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "link 'nowhere' can't be bound" in ended.stderr and "Traceback" not in ended.stderr


class Stream:
    """A stream read by its own thread."""

    def __init__(self, client: SyncRosterClient, max_tokens: int) -> None:
        self.num_tokens = 0
        self.reason: FinishReason | None = None
        self.error: RosterError | None = None
        self._thread = threading.Thread(target=self._read, args=(client, max_tokens))
        self._thread.start()

    def _read(self, client: SyncRosterClient, max_tokens: int) -> None:
        try:
            for event in client.generate("a stream", raw=True, max_tokens=max_tokens):
                if isinstance(event, Delta):
                    self.num_tokens += len(event.token_ids)
                if isinstance(event, Finish):
                    self.reason = event.reason
        except RosterError as error:
            self.error = error

    def await_tokens(self) -> None:
        deadline = time.monotonic() + 20
        while not self.num_tokens:
            assert time.monotonic() < deadline and self.error is None, self.error
            time.sleep(0.01)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def is_refused(client: SyncRosterClient) -> bool:
    """Whether a new request is refused because the service shuts down; one that arrives before the signal is served."""
    try:
        client.generate("too late", raw=True, max_tokens=2, deadline_s=10).completion()
    except UnavailableError:
        return True
    return False


@pytest.mark.parametrize("workers", [0, 2])
def test_sigterm_lets_streams_finish_and_takes_nothing_new(tmp_path: Path, workers: int) -> None:
    with RosterProcesses(tmp_path, scheduler={"front_workers": workers}, runner=SLOW) as roster:
        roster.await_workers(workers)
        with SyncRosterClient(roster.address) as client:
            stream = Stream(client, max_tokens=40)
            stream.await_tokens()
            psutil.Process(roster.pid("scheduler")).send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 20
            while not is_refused(client):
                assert time.monotonic() < deadline, roster.logs()
            stream.join()
        assert (stream.reason, stream.num_tokens) == (FinishReason.LENGTH, 40)
        assert roster.stop()["scheduler"] == 0


def test_the_drain_has_a_limit_and_streams_are_told(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler={"drain_s": 0.5}, runner=SLOW) as roster:
        with SyncRosterClient(roster.address) as client:
            stream = Stream(client, max_tokens=2000)
            stream.await_tokens()
            start = time.monotonic()
            assert roster.end("scheduler") == 0
            assert time.monotonic() - start < 20, "the stream's own end is 80 s away"
            stream.join()
        assert stream.reason is FinishReason.UNAVAILABLE and stream.error is None


def test_a_front_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    """With both of its listeners."""
    scheduler = {"gateway_listen": "127.0.0.1:0"}
    with RosterProcesses(tmp_path, scheduler=scheduler, runner={"device": "hash"}) as roster:
        (worker,) = roster.children("scheduler")
        psutil.Process(worker).kill()
        deadline = time.monotonic() + 20
        while True:
            try:
                with SyncRosterClient(roster.address) as client:
                    assert list(client.generate("again", raw=True, max_tokens=3))
                break
            except RosterError:
                assert time.monotonic() < deadline, roster.logs()
                time.sleep(0.2)
        gateway = re.search(r"gateway=(127\.0\.0\.1:[1-9]\d*)", roster.logs())
        assert gateway is not None
        with grpc.insecure_channel(gateway[1]) as channel:
            health = vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(
                vllm_engine_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True
            )
        assert health.healthy
        assert roster.stop() == {"scheduler": 0, "runner": 0}
