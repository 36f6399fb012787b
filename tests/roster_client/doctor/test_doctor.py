"""`roster doctor` finds what would keep the services from starting, and says what to do."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.doctor import accelerator, addresses, machine, model
from roster_client.doctor.findings import State
from roster_common import extras
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.thoroughness import FULL


def test_the_command(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        given = [
            "--device=hash",
            f"--listen={taken}",
            "--admin-listen=",
            f"--cache-dir={tmp_path}",
            "--link=ipc:///tmp/x",
        ]
        result = CliRunner().invoke(app, ["doctor", *given, "--json"])
        assert result.exit_code == 1, result.output
        found = {finding["subject"]: finding for finding in json.loads(result.stdout)}
        assert found["listen"]["state"] == "problem" and "or set listen (ROSTER_LISTEN)" in found["listen"]["todo"]
        assert found["cache"]["state"] == "ok" and str(tmp_path) in found["cache"]["text"]
        expected = {"version", "extra scheduler", "extra runner", "settings of the runner", "link", "gateway", "model"}
        assert expected | {"open files", "cores", "clock", "temporary files"} <= found.keys()
    given[1] = "--listen=127.0.0.1:0"
    result = CliRunner().invoke(app, ["doctor", *given, "--metrics-listen="], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "settings of the scheduler" in result.stdout


def test_settings_that_can_not_be_used() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device=hash", "--depth=9", "--json"])
    found = {finding["subject"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert found["settings of the scheduler"]["text"] == "setting depth: Input should be less than or equal to 3"


def test_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "missing", lambda modules: ["zmq"] if "zmq" in modules else [])
    found = {finding.subject: finding for finding in machine.extras()}
    assert found["extra scheduler"].state is State.PROBLEM
    assert found["extra scheduler"].todo == "pip install 'roster-serve[scheduler]'"
    assert found["extra openai"].state is State.OK


def test_limits_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 8192))
    assert (machine.open_files().state, machine.open_files().todo) == (State.WARNING, "ulimit -n 8192")
    assert machine.folder("cache", tmp_path / "a" / "b").state is State.OK
    assert not (tmp_path / "a").exists()
    unwritable = machine.folder("cache", Path("/dev/null/x"))
    assert unwritable.state is State.PROBLEM and "set cache_dir" in unwritable.todo
    monkeypatch.setattr(machine, "_time_state", lambda: 5)
    assert machine.clock().state is State.NOTE


def test_what_drafts(tmp_path: Path) -> None:
    found = model.drafter("model:no model", "cpu")
    assert found is not None and (found.subject, found.state) == ("draft model", State.PROBLEM)
    assert model.drafter("ngram", "cpu") is None and model.drafter("model:hash", "hash") is None
    for kind, subject in (("medusa", "Medusa heads"), ("eagle", "draft layer")):
        missing, here = model.drafter(f"{kind}:{tmp_path}/none", "cpu"), model.drafter(f"{kind}:{tmp_path}", "cpu")
        assert missing is not None and (missing.subject, missing.state) == (subject, State.PROBLEM)
        assert here is not None and here.state is State.OK
    for draft in ("model:smollm2", "medusa:.", "eagle:."):
        found = model.drafter(draft, "cuda")
        assert found is not None and found.state is State.OK


def test_models(tmp_path: Path) -> None:
    assert model.model("smollm2", "cpu").state is State.OK
    assert model.model("no model", "cpu").state is State.PROBLEM
    assert model.model("acme/not-here", "cpu").state is State.NOTE
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"], "model_type": "unheard"}')
    refused = model.model(str(tmp_path), "cpu")
    assert refused.state is State.PROBLEM and "can't be served" in refused.text


def test_gateways_that_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "gateway_program", lambda: "/bin/smg")
    locked = SchedulerSettings(tokens=Path("tokens"))
    assert addresses.gateway(locked).state is State.WARNING
    assert addresses.gateway(locked.model_copy(update={"gateway_listen": "127.0.0.1:1"})).state is State.OK
    monkeypatch.setattr(addresses, "gateway_program", lambda: None)
    assert addresses.gateway(locked).state is State.NOTE


@pytest.mark.parametrize(
    ("found", "device", "state"),
    [
        ({"why": "", "free": 0.9}, "auto", State.OK),
        ({"why": "", "free": 0.1}, "auto", State.WARNING),
        ({"why": "no driver", "todo": "install it", "here": True}, "auto", State.WARNING),
        ({"why": "no GPU", "todo": "", "here": False}, "auto", State.NOTE),
        ({"why": "no GPU", "todo": "", "here": False}, "cuda", State.PROBLEM),
    ],
)
def test_cards(found: dict, device: str, state: State) -> None:
    assert accelerator._card(found, device).state is state


@pytest.mark.skipif(not FULL, reason="imports torch in a process")
def test_the_gpu_is_asked() -> None:
    cuda, gpu = accelerator.gpu("auto")
    assert cuda.text.startswith("torch ") and gpu.state is not State.PROBLEM


def test_the_extras_are_those_of_the_package() -> None:
    """Each module of the table is brought by the extra that it stands for."""
    names = {"grpc_reflection": "grpcio-reflection", "prometheus_client": "prometheus-client", "zmq": "pyzmq"}
    names |= {"smg_grpc_proto": "smg-grpc-proto", "cupy": "cupy-cuda13x", "opentelemetry.sdk": "opentelemetry-sdk"}
    names |= {"opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc"}
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    for extra, modules in extras.MODULES.items():
        brought = {requirement.split(">")[0].split("=")[0] for requirement in project["optional-dependencies"][extra]}
        assert {names.get(module, module) for module in modules} <= brought, extra
    for extra in ("scheduler", "runner"):
        brought = {requirement.split(">")[0] for requirement in project["optional-dependencies"][extra]}
        assert {names.get(module, module) for module in extras.MODULES[extra]} == brought, extra
