"""Unknown settings: misspellings are refused with the name that was meant, others warned of, injected ones ignored."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from roster_client.cli import app
from roster_common.logs import warn_unknown
from roster_common.setting_names import SETTINGS
from roster_common.setting_sources import ServiceSettings, UnusableSettings
from roster_common.unknown_settings import CLIENT, edits, refused_variable, unknown_variables
from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

ROOT = Path(__file__).resolve().parents[2]
SERVICES = (SchedulerSettings, RunnerSettings)
INJECTED = [
    "ROSTER_PORT",
    "ROSTER_SERVICE_HOST",
    "ROSTER_SERVICE_PORT",
    "ROSTER_SERVICE_PORT_GRPC",
    "ROSTER_PORT_50061_TCP",
    "ROSTER_PORT_50061_TCP_PROTO",
    "ROSTER_PORT_50061_TCP_ADDR",
    "ROSTER_ADMIN_PORT",
    "ROSTER_ADMIN_SERVICE_HOST",
    "ROSTER_LINK_PORT",
    "ROSTER_LINK_PORT_50063_TCP",
    "ROSTER_FOR_GATEWAY_SERVICE_PORT_GATEWAY",
]


@pytest.mark.parametrize("settings", SERVICES)
@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("ROSTER_POLCY", "ROSTER_POLICY"),
        ("roster_polcy", "ROSTER_POLICY"),
        ("ROSTER_DEVISE", "ROSTER_DEVICE"),
        ("ROSTER_SLOT", "ROSTER_SLOTS"),
        ("ROSTER_SERVRE", "ROSTER_SERVER"),
        ("ROSTER_SETTING", "ROSTER_SETTINGS"),
        ("ROSTER_TEST_BACKENDS", "ROSTER_TEST_BACKEND"),
    ],
)
def test_misspelled_variables_are_refused(
    settings: type[ServiceSettings], variable: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "x")
    with pytest.raises(UnusableSettings) as refused:
        settings.read()
    assert str(refused.value) == f"{variable} is not a setting: did you mean {meant}? Correct its name, or unset it"


def test_the_client_refuses_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("ROSTER_SERVR", "127.0.0.1:1")
        refused = CliRunner().invoke(app, ["health"])
        assert (refused.exit_code, refused.stderr.count("\n")) == (
            2,
            1,
        ) and "did you mean ROSTER_SERVER?" in refused.stderr
    monkeypatch.setenv("ROSTER_SOMETHING_ELSE", "1")
    monkeypatch.setenv("ROSTER_AND_MORE", "1")
    warned = CliRunner().invoke(app, ["health", "--server", "127.0.0.1:1"])
    assert warned.exit_code == 3 and warned.stderr.startswith("ROSTER_SOMETHING_ELSE, ROSTER_AND_MORE: these variables")


@pytest.mark.parametrize("settings", SERVICES)
def test_known_and_injected_names_are_silent(settings: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the other service and of the client, and those that Kubernetes makes of the manifests' Services."""
    others = {"ROSTER_SLOTS": "2", "ROSTER_DEPTH": "1", "ROSTER_TOKEN": "t", "ROSTER_TEST_FULL": "0"}
    for variable, value in [*others.items(), *((name, "tcp://10.0.0.1:50061") for name in INJECTED)]:
        monkeypatch.setenv(variable, value)
    with capture_logs() as logs:
        settings.read()
        warn_unknown()
    assert logs == []


def test_other_variables_are_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSTER_BATCH_SIZE", "7")
    monkeypatch.setenv("ROSTER_WORKERS_PER_CORE", "7")
    with capture_logs() as logs:
        SchedulerSettings.read()
        warn_unknown()
    assert [line["log_level"] for line in logs] == ["warning"]
    assert logs[0]["variables"] == ["ROSTER_BATCH_SIZE", "ROSTER_WORKERS_PER_CORE"]


@pytest.mark.parametrize("settings", SERVICES)
@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("polcy", "did you mean 'policy'?"),
        ("log-level", "did you mean 'log_level'?"),
        ("batch_size", "remove it (docs/settings.md lists the settings)"),
        ("server", "remove it"),
    ],
)
def test_unknown_keys_of_the_file_are_refused(
    settings: type[ServiceSettings], key: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"depth": 1, "slots": 2, key: "x"}))
    monkeypatch.setenv("ROSTER_SETTINGS", str(file))
    with pytest.raises(UnusableSettings) as refused:
        settings.read()
    assert f"which has the key {key!r}, which is not a setting: {remedy}" in str(refused.value)


@pytest.mark.parametrize(
    ("first", "second", "distance"), [("", "ab", 2), ("polcy", "policy", 1), ("kitten", "sitting", 3)]
)
def test_edits(first: str, second: str, distance: int) -> None:
    assert edits(first, second) == edits(second, first) == distance


def test_every_variable_of_this_repository_is_known() -> None:
    """Of its sources, deployment and tests; a misspelled one on a page would be found too."""
    found = subprocess.run(
        ["git", "grep", "-hoE", r"\bROSTER_[A-Z][A-Z0-9_]*[A-Z0-9]\b", "--", "*.py", "*.yaml", "*.md", "deploy",
         ":!tests/roster_common/test_unknown_settings.py", ":!*_pb2*", ":!roster_common/unknown_settings.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode:
        pytest.skip("this is not a checkout")
    names = dict.fromkeys(found.stdout.split(), "")
    assert len(names) > 50 and refused_variable(names) is None and unknown_variables(names) == []


def test_the_client_reads_these_variables() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "roster_client").rglob("*.py"))
    assert {name.removeprefix("ROSTER_") for name in re.findall(r'envvar="(ROSTER_\w+)"', sources)} == CLIENT - {
        "SETTINGS"
    }
    assert len(SETTINGS) == len({*SchedulerSettings.model_fields, *RunnerSettings.model_fields})
