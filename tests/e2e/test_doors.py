"""Access to both services as processes: TLS, client certificates, tokens, CURVE, and the command with credentials."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated.common_pb2 import SubscribeKvEventsRequest

from roster_client.client.admin import AdminClient
from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_client.client.errors import NotFoundError, RosterError, UnavailableError
from roster_client.client.health import check_health
from roster_client.client.sync_client import SyncRosterClient
from roster_common.curve_keys import generate
from tests.support.certificates import Authority
from tests.support.in_this_process import run_runner, run_scheduler
from tests.support.processes import RosterProcesses, roster_processes

ACME, ZEN, ROOT = "acme-token-0123456789", "zen-token-0123456789", "root-token-0123456789"
QUICK = {"device": "hash", "slots": 2}


@dataclass
class Fortress:
    """Services with all protections on, and credentials for them."""

    processes: RosterProcesses
    acme: Credentials
    admin: Credentials
    strange_certificate: Credentials


@pytest.fixture(scope="module")
def fortress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    folder = tmp_path_factory.mktemp("fortress")
    authority, other = Authority(folder), Authority(folder, "other")
    server, client, stranger = authority.issue("server"), authority.issue("client"), other.issue("stranger")
    (folder / "tokens").write_text(f"acme {ACME}\nzen {ZEN}\n")
    (folder / "admin-tokens").write_text(f"root {ROOT}\n")
    scheduler_key, scheduler_public = generate(folder, "scheduler")
    runner_key, runner_public = generate(folder, "runner")
    acme = Credentials(tls_ca=authority.ca, cert=client[0], key=client[1], token=ACME)
    scheduler = {
        "tls_cert": server[0], "tls_key": server[1], "tls_client_ca": authority.ca, "tokens": folder / "tokens",
        "admin_tokens": folder / "admin-tokens", "link_key": scheduler_key, "link_runners": runner_public,
        "front_workers": 1,
    }  # fmt: skip
    runner = {**QUICK, "runner_key": runner_key, "scheduler_key": scheduler_public}
    with roster_processes(folder, scheduler=scheduler, runner=runner, credentials=acme) as processes:
        yield Fortress(
            processes,
            acme,
            replace(acme, token=ROOT),
            replace(acme, cert=stranger[0], key=stranger[1]),
        )


def call(fortress: Fortress, credentials: Credentials, tenant: str = "") -> str:
    """Returns the text of an answer from the public API."""
    with SyncRosterClient(fortress.processes.address, tenant=tenant, credentials=credentials) as client:
        completion = client.generate("hello", raw=True, max_tokens=4, seed=1, deadline_s=10).completion()
        return completion.choices[0].text


def test_a_client_with_every_credential_is_served(fortress: Fortress) -> None:
    assert call(fortress, fortress.acme) == call(fortress, fortress.acme, tenant="acme")


@pytest.mark.parametrize(
    ("token", "tenant", "code"),
    [
        ("", "", grpc.StatusCode.UNAUTHENTICATED),
        ("", "acme", grpc.StatusCode.UNAUTHENTICATED),
        ("nobody-knows-this-token", "", grpc.StatusCode.UNAUTHENTICATED),
        (ROOT, "", grpc.StatusCode.UNAUTHENTICATED),
        (ACME, "zen", grpc.StatusCode.PERMISSION_DENIED),
    ],
)
def test_a_token_is_required_and_determines_the_tenant(
    fortress: Fortress, token: str, tenant: str, code: grpc.StatusCode
) -> None:
    credentials = replace(fortress.acme, token=token)
    with SyncRosterClient(fortress.processes.address, tenant=tenant, credentials=credentials) as client:
        for refused in (
            lambda: client.generate("hello", raw=True, deadline_s=10).completion(),
            lambda: client.attach("some", deadline_s=10).completion(),
            lambda: client.cancel("some", deadline_s=10),
            lambda: client.tokenize("hello", deadline_s=10),
            lambda: client.detokenize([1], deadline_s=10),
            lambda: client.get_model(deadline_s=10),
        ):
            with pytest.raises(RosterError) as caught:
                refused()
            assert caught.value.code is code
            assert ACME not in caught.value.message


def test_a_gateways_calls_need_the_same_credentials(fortress: Fortress) -> None:
    with fortress.acme.channel(fortress.processes.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        asked = vllm_engine_pb2.GenerateRequest(request_id="g", text="hello")
        asked.sampling_params.max_tokens = 4
        asked.sampling_params.ignore_eos = True
        (answer,) = stub.Generate(asked, metadata=fortress.acme.metadata, timeout=10)
        assert answer.complete.completion_tokens == 4
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(asked, timeout=10))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as refused:
            stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as refused:  # it would reveal all tenants' prompts to one
            next(stub.SubscribeKvEvents(SubscribeKvEventsRequest(), metadata=fortress.acme.metadata, timeout=10))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_tenant_can_not_reach_the_requests_of_another(fortress: Fortress) -> None:
    with SyncRosterClient(fortress.processes.address, credentials=fortress.acme) as client:
        client.generate("hello", raw=True, request_id="mine", max_tokens=2, deadline_s=10).completion()
        assert client.attach("mine", deadline_s=10).completion().choices
    with SyncRosterClient(fortress.processes.address, credentials=replace(fortress.acme, token=ZEN)) as client:
        with pytest.raises(NotFoundError):
            client.attach("mine", deadline_s=10).completion()
        with pytest.raises(NotFoundError):
            client.cancel("mine", deadline_s=10)


def test_a_wrong_certificate_fails_before_the_token(fortress: Fortress) -> None:
    without = replace(fortress.acme, cert=None, key=None)
    for credentials in (IN_THE_CLEAR, without, fortress.strange_certificate):
        with SyncRosterClient(fortress.processes.address, credentials=credentials) as client:
            with pytest.raises(UnavailableError):
                client.get_model(deadline_s=5)
            with pytest.raises(RosterError):
                check_health(client.channel, 5)


def test_health_needs_no_token(fortress: Fortress) -> None:
    for address in (fortress.processes.address, fortress.processes.admin_address):
        with SyncRosterClient(address, credentials=replace(fortress.acme, token="")) as client:
            for service in ("", "roster.v1.InferenceService", "roster.engine", "roster.runner"):
                # One listener may learn of the runner a moment after the other.
                deadline = time.monotonic() + 10
                while (status := check_health(client.channel, 5, service)) != "SERVING":
                    assert time.monotonic() < deadline, (service, status)
                    time.sleep(0.05)


async def test_the_admin_api_has_tokens_of_its_own(fortress: Fortress) -> None:
    async with AdminClient(fortress.processes.admin_address, credentials=fortress.admin) as admin:
        assert (await admin.get_status(deadline_s=10)).runners[0].device == "hash"
    for credentials in (fortress.acme, replace(fortress.acme, token="")):
        async with AdminClient(fortress.processes.admin_address, credentials=credentials) as admin:
            with pytest.raises(RosterError) as caught:
                await admin.get_status(deadline_s=10)
            assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(RosterError):
                await admin.watch_steps()
            with pytest.raises(RosterError):
                async for _ in admin.drain(0):
                    pass


def test_the_command_takes_credentials(fortress: Fortress) -> None:
    credentials = fortress.acme
    flags = ["--tls-ca", credentials.tls_ca, "--cert", credentials.cert, "--key", credentials.key]

    def roster(*arguments: str, token: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "roster_client.cli", *map(str, flags), *arguments]
        environment = {"ROSTER_TOKEN": token, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    address, admin = fortress.processes.address, fortress.processes.admin_address
    assert roster("generate", "-s", address, "--raw", "-m", "2", "-q", "hello", token=ACME).returncode == 0
    refused = roster("generate", "-s", address, "--raw", "hello", token="")
    assert refused.returncode == 1 and "this server requires a token" in refused.stderr
    assert roster("health", "-s", address, token="").stdout == "SERVING\n"
    status = roster("status", "--admin", admin, "--json", token=ROOT)
    assert json.loads(status.stdout)["runners"][0]["device"] == "hash", status.stderr


def test_a_runner_with_another_key_is_ignored(fortress: Fortress, tmp_path: Path) -> None:
    key, _ = generate(tmp_path, "stranger")
    settings = fortress.processes.settings("runner")
    link, scheduler_public = str(settings["link"]), str(settings["scheduler_key"])
    flags = ["--device", "hash", "--link", link, "--runner-id", "stranger"]
    keys = ["--runner-key", str(key), "--scheduler-key", scheduler_public]
    command = [sys.executable, "-m", "runner_svc.main", *flags]
    strangers = [
        subprocess.Popen([*command, *doors], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for doors in (keys, [])
    ]
    try:
        deadline = time.monotonic() + 60
        while "a key that is not allowed" not in fortress.processes.logs():
            assert time.monotonic() < deadline, fortress.processes.logs()
            time.sleep(0.05)
        time.sleep(0.5)  # the runner without a key leaves no log line; it started at the same time as the other
        assert [stranger.poll() for stranger in strangers] == [None, None]
    finally:
        for stranger in strangers:
            stranger.terminate()
        for stranger in strangers:
            stranger.wait(20)
    with SyncRosterClient(fortress.processes.address, credentials=fortress.acme) as client:
        assert client.get_model(deadline_s=5).vocab_size
    assert "stranger" not in fortress.processes.logs()


def test_unusable_files_are_reported_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    tls = [f"--tls-cert={cert}", f"--tls-key={key}"]
    other_key = authority.issue("other")[1]
    for run, flags, sentence in (
        (run_scheduler, [f"--tls-cert={cert}", f"--tls-key={other_key}"], "TLS can't be set up"),
        (run_scheduler, [f"--tls-cert={cert}", f"--tls-key={tmp_path}/none"], "TLS can't be set up"),
        (run_scheduler, [*tls, f"--tokens={tmp_path}/empty"], "contains no tokens"),
        (run_scheduler, [f"--tls-cert={cert}"], "tls_cert and tls_key belong together"),
        (run_scheduler, ["--admin-listen=0.0.0.0:0"], "admin_listen is 0.0.0.0:0, which is open to the network"),
        (run_scheduler, ["--gateway-listen=0.0.0.0:0"], "gateway_listen is 0.0.0.0:0, which is open to the network"),
        (run_scheduler, [f"--link-key={key}", f"--link-runners={tmp_path}/empty"], "a key has 40 characters"),
        (run_runner, ["--device=hash", f"--runner-key={key}", f"--scheduler-key={key}"], "must contain one key"),
        (run_runner, ["--device=hash", f"--runner-key={key}"], "set both or neither"),
    ):  # fmt: skip
        base = ["--listen=127.0.0.1:0", "--admin-listen=", "--metrics-listen="] if run is run_scheduler else []
        ended = run(*base, "--link=tcp://127.0.0.1:*", *flags)
        assert ended.returncode == 2 and sentence in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
