"""compose.yaml as a file: valid, pinned, with minimal privileges; and the tests' reading of it without Docker."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scheduler_svc.front.request.tenant import Tenants
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support.compose_file import compose_variables, read_compose
from tests.support.local_stack import LocalStack

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "compose.yaml"
DOCUMENT = yaml.safe_load(FILE.read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]


def schema() -> dict[str, Any]:
    """Returns Compose's schema, which check-jsonschema includes with its licence."""
    text = files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def test_the_file_is_valid() -> None:
    jsonschema.validate(DOCUMENT, schema())


def test_the_schema_detects_a_mistake() -> None:
    wrong = json.loads(json.dumps(DOCUMENT))
    wrong["services"]["scheduler"]["heathcheck"] = {}
    with pytest.raises(jsonschema.ValidationError, match="heathcheck"):
        jsonschema.validate(wrong, schema())


def test_profiles() -> None:
    always = {"scheduler", "gateway", "prometheus", "grafana"}
    for profile, runner in (("cpu", "runner-cpu"), ("gpu", "runner-gpu")):
        assert {service.name for service in read_compose(FILE, profile, {})} == always | {runner}
    devices = SERVICES["runner-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia" and "deploy" not in SERVICES["runner-cpu"]


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_is_bounded_and_watched(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped" and service["healthcheck"]["test"][0] == "CMD"
    assert (
        service["read_only"] and service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
    )
    assert service["mem_limit"] and service["pids_limit"]
    assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+(-cuda)?", service["image"]), "pin the image"


def test_all_ports_are_published_on_loopback_by_default() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == 5
    assert all(port.startswith(("127.0.0.1:", "${ROSTER_BIND:-127.0.0.1}:")) for port in ports)


def test_only_the_gateway_reaches_the_listener_without_tokens() -> None:
    services = {service.name: service for service in read_compose(FILE, "cpu", {})}
    scheduler = services["scheduler"]
    host, _, port = scheduler.environment["ROSTER_GATEWAY_LISTEN"].rpartition(":")
    (network,) = (name for name, aliases in scheduler.networks.items() if host in aliases)
    assert DOCUMENT["networks"][network]["internal"]
    assert {name for name, service in services.items() if network in service.networks} == {"scheduler", "gateway"}
    assert int(port) not in scheduler.ports
    assert any(f"grpc://{host}:{port}" in part for part in services["gateway"].command)
    assert scheduler.environment["ROSTER_TOKENS"] == "/run/secrets/tokens"


def test_services_get_the_time_to_drain() -> None:
    drain_s = SchedulerSettings.model_fields["drain_s"].default
    assert int(SERVICES["scheduler"]["stop_grace_period"].removesuffix("s")) >= drain_s + 10


def test_the_images_do_not_run_as_root() -> None:
    for service in SERVICES.values():
        if "build" in service:
            dockerfile = (ROOT / service["build"]["dockerfile"]).read_text("utf-8")
            assert re.search(r"^USER (?!root)\w+$", dockerfile, re.M)
            assert set(re.findall(r"^FROM (\S+)", dockerfile, re.M)) == {"python:3.11-slim-bookworm"}


def test_the_example_environment_lists_every_default() -> None:
    lines = (ROOT / ".env.example").read_text("utf-8").splitlines()
    example = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert example == compose_variables(FILE)


def test_secrets_are_made_once_and_for_their_owner(tmp_path: Path) -> None:
    LocalStack(tmp_path, "cpu").make_secrets()
    folder = tmp_path / "secrets"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made = {path.name: path.read_text() for path in folder.iterdir()}
    assert {f"{{ROSTER_SECRETS:-./deploy/secrets}}/{name}" for name in made} > {
        secret["file"].removeprefix("$") for secret in DOCUMENT["secrets"].values()
    }
    assert Tenants.read(folder / "admin_tokens").need_tokens and Tenants.read(folder / "tokens").need_tokens
    LocalStack(tmp_path, "cpu").make_secrets()
    assert {path.name: path.read_text() for path in folder.iterdir()} == made


def test_secrets_stay_out_of_git() -> None:
    ignored = subprocess.run(
        ["git", "check-ignore", ".env", "deploy/secrets/x"], cwd=ROOT, capture_output=True, text=True
    )
    assert ignored.stdout.split() == [".env", "deploy/secrets/x"]


def test_local_hosts_ports_and_secrets(tmp_path: Path) -> None:
    """Without Docker, only hosts, ports and paths of secrets change."""
    stack = LocalStack(tmp_path, "cpu")
    assert stack._localize("fcfs") == "fcfs"
    assert stack._localize("tcp://scheduler:50063").startswith("tcp://127.0.0.1:")
    assert stack._localize("0.0.0.0:50061") == stack.address
    assert stack._localize("grpc://scheduler-for-gateway:50065").startswith("grpc://127.0.0.1:")
    assert (
        stack._localize("--host 0.0.0.0 --port 30000") == f"--host 127.0.0.1 --port {stack.gateway.rpartition(':')[2]}"
    )
    assert stack._localize("/run/secrets/scheduler.key") == f"{stack.secrets}/scheduler.key"


def test_make_builds_the_images_with_the_commit() -> None:
    done = subprocess.run(["make", "-n", "images"], cwd=ROOT, capture_output=True, text=True, check=True)
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert "ROSTER_COMMIT=$(git rev-parse" in done.stdout
    assert set(re.findall(r"--profile (\w+)", done.stdout)) == profiles


def test_the_images_are_labelled() -> None:
    """The version's agreement with the project's is tested in tests/packaging/test_version.py."""
    licence = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["license"]
    for service in SERVICES.values():
        if "build" in service:
            assert {"ROSTER_COMMIT", "ROSTER_SOURCE_URL"} <= set(service["build"]["args"])
            final = (ROOT / service["build"]["dockerfile"]).read_text("utf-8").rpartition("\nFROM ")[2]
            labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', final))
            assert labels["title"] == service["image"].partition(":")[0] and labels["description"].endswith(".")
            assert labels["version"] == service["image"].partition(":")[2].removesuffix("-cuda")
            assert labels["licenses"] == licence
            assert (labels["revision"], labels["source"]) == ("$ROSTER_COMMIT", "$ROSTER_SOURCE_URL")
            arguments = final.partition("LABEL ")[0].splitlines()
            assert {"ARG ROSTER_COMMIT", "ARG ROSTER_SOURCE_URL"} <= set(arguments), "a stage sees only its own"
