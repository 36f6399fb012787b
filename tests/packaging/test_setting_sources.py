"""Unreadable settings are reported in one sentence that names the file, the variable or the flag, in every command."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from roster_common.service_command import read_command_line
from roster_common.setting_sources import ServiceSettings, UnusableSettings
from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.settings.scheduler_settings import SchedulerSettings
from tests.support import fork_server

ROOT = Path(__file__).parents[2]
SERVICES = {"scheduler": SchedulerSettings, "runner": RunnerSettings}
BROKEN = {
    "cut short": (b'{"log_level": "info"', "which is not JSON (Expecting ',' delimiter, line 1 column 21): correct"),
    "empty": (b"", "which is not JSON (Expecting value, line 1 column 1): correct the file"),
    "too deep": (b"[" * 200_000, "which is not JSON (too deep): correct the file"),
    "endless number": (b'{"threads": ' + b"9" * 5000 + b"}", "which is not JSON (Exceeds the limit"),
    "a list": (b'["info"]', 'which is JSON but not an object: write settings by name, for example {"log_level":'),
    "null": (b"null", "which is JSON but not an object"),
    "Latin-1": ('{"model": "Köln"}'.encode("latin-1"), "which is not UTF-8 (byte 12): save the file as UTF-8"),
    "UTF-16": ('{"log_level": "info"}'.encode("utf-16"), "which is not UTF-8 (byte 0): save the file as UTF-8"),
}


def broken_file(folder: Path, name: str) -> str:
    """Returns the path of a file that can't be used."""
    path = folder / "settings.json"
    path.write_bytes(BROKEN[name][0])
    return str(path)


def read(service: str, *flags: str) -> ServiceSettings:
    return read_command_line(SERVICES[service], f"roster-{service}", "", str, flags)


def refusal(service: str, *flags: str) -> str:
    with pytest.raises(UnusableSettings) as refused:
        read(service, *flags)
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("service", SERVICES)
class TestBoth:
    """Tests of both services."""

    @pytest.mark.parametrize("name", BROKEN)
    def test_a_broken_file(self, service: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = broken_file(tmp_path, name)
        monkeypatch.setenv("ROSTER_SETTINGS", path)
        assert refusal(service).startswith(f"ROSTER_SETTINGS names {path!r}, {BROKEN[name][1]}")

    @pytest.mark.parametrize(
        ("path", "reason"),
        [
            ("/no/such/file.json", "No such file or directory"),
            ("/", "Is a directory"),
            ("/dev/null/settings.json", "Not a directory"),
            ("~nobody-of-this-name/settings.json", "Could not determine home directory."),
            ("x" * 300, "File name too long"),
        ],
    )
    def test_a_missing_file(self, service: str, path: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROSTER_SETTINGS", path)
        assert refusal(service) == (
            f"ROSTER_SETTINGS names {path!r}, which can't be read ({reason}): "
            "name a readable JSON file, or unset ROSTER_SETTINGS"
        )

    def test_a_file_of_another_user(self, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(*arguments: object) -> str:
            raise PermissionError(13, "Permission denied")  # because root can read every file

        monkeypatch.setattr(Path, "read_text", denied)
        monkeypatch.setenv("ROSTER_SETTINGS", str(tmp_path))
        assert "which can't be read (Permission denied): name a readable JSON file" in refusal(service)

    def test_help_beside_a_broken_file(
        self, service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("ROSTER_SETTINGS", "/no/such/file.json")
        with pytest.raises(SystemExit, match="0"):
            read(service, "--help")
        assert "--log-level" in capsys.readouterr().out

    def test_a_good_file(self, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A byte order mark is accepted, and so is a key that only the other service has."""
        path = tmp_path / "settings.json"
        values = {"log_level": "error", "depth": 1, "slots": 2}
        path.write_text(json.dumps(values), "utf-8-sig")
        monkeypatch.setenv("ROSTER_SETTINGS", str(path))
        settings = SERVICES[service].read()
        assert settings.log_level == "error"
        assert (
            settings.model_dump(include={"depth", "slots"})
            == {"scheduler": {"depth": 1}, "runner": {"slots": 2}}[service]
        )

    def test_no_file_is_named(self, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROSTER_SETTINGS", "")
        assert SERVICES[service].read().log_level == "info"

    def test_bytes_that_are_not_text(self, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert refusal(service, "--link=tcp://\udcff") == (
            "setting link: 'tcp://\\udcff' is not UTF-8: write it as UTF-8"
        )
        monkeypatch.setenv("ROSTER_LINK", "\udcff")
        assert refusal(service) == "setting link: '\\udcff' is not UTF-8: write it as UTF-8"


@pytest.mark.parametrize(
    ("service", "setting", "value"),
    [
        ("scheduler", "tokens", "tok\udc80"),
        ("runner", "runner_key", "key\udc80"),
        ("runner", "model", "a\udc80"),
        ("scheduler", "policy_parameters", '{"a": [1, {"b": "\udc80"}]}'),
        ("scheduler", "policy_parameters", '{"a": {"\udc80": 1}}'),
        ("scheduler", "policy_parameters", r'{"a": "\udc80"}'),
        ("scheduler", "tenant_limits", '{"\udc80": {"waiting": 1}}'),
    ],
)
def test_bytes_that_are_not_text_anywhere(
    service: str, setting: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In paths, in strings with a least length, in objects and their keys; from flags, variables and arguments."""
    said = f"setting {setting}: {value if value[0] != '{' else chr(0xDC80)!r} is not UTF-8: write it as UTF-8"
    assert refusal(service, f"--{setting.replace('_', '-')}={value}") == said
    with pytest.raises(UnusableSettings) as refused:
        SERVICES[service].read(**{setting: json.loads(value) if value[0] == "{" else Path(value)})
    assert str(refused.value) == said
    monkeypatch.setenv(f"ROSTER_{setting}".upper(), value)
    assert refusal(service) == said


def test_deep_parameters() -> None:
    """The deepest JSON that can be parsed causes no traceback."""
    SchedulerSettings.read(policy_parameters={"a": json.loads("[" * 900 + "]" * 900)})


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("{bad", "Expecting property name enclosed in double quotes, line 1 column 2"),
        ("", "Expecting value, line 1 column 1"),
        ("[" * 200_000, "too deep"),
    ],
)
def test_a_variable_that_is_not_json(value: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROSTER_TENANT_LIMITS", "ROSTER_POLICY_PARAMETERS"):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            assert refusal("scheduler") == f"{name} is not JSON ({fault}): correct it, or unset it"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("{bad", "is not JSON (Expecting property name enclosed in double quotes, line 1 column 2)"),
        ('{"a": ' + "[" * 200_000, "is not JSON (too deep)"),
        ("[1]", "is neither a JSON object nor NAME=VALUE"),
        ("bad", "is neither a JSON object nor NAME=VALUE"),
    ],
)
def test_a_flag_that_is_not_json(value: str, fault: str) -> None:
    said = refusal("scheduler", f"--tenant-limits={value}")
    assert said == f"--tenant-limits {fault}: correct it"


TRACE = str(ROOT / "bench/traces/azure_conv_2023_busiest2000.csv")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["scheduler_svc.main"], "cut short"),
        (["scheduler_svc.main"], "Latin-1"),
        (["runner_svc.main", "--device=hash"], "cut short"),
        (["runner_svc.main", "--device=hash"], "too deep"),
        (["roster_client.cli", "serve", "--device=hash"], "a list"),
        (["roster_client.cli", "simulate", f"--trace={TRACE}", "--cost=cpu-smollm2"], "null"),
        (["roster_client.cli", "calibrate", "model.json", "--device=hash"], "UTF-16"),
        (["bench.gpu_serving.recording_runner", "--record=steps", "--device=hash"], "empty"),
    ],
)
def test_the_commands_report_it(tmp_path: Path, command: list[str], name: str) -> None:
    path = broken_file(tmp_path, name)
    ended = run(tmp_path, command, ROSTER_SETTINGS=path)
    assert f"ROSTER_SETTINGS names {path!r}, {BROKEN[name][1]}" in ended.stderr
    assert (len(ended.stderr.splitlines()), ended.returncode) == (1, 2), ended.stderr


@pytest.mark.parametrize("command", [["scheduler_svc.main"], ["roster_client.cli", "serve", "--device=hash"]])
def test_the_commands_name_the_variable(tmp_path: Path, command: list[str]) -> None:
    ended = run(tmp_path, command, ROSTER_TENANT_LIMITS="{bad")
    assert "ROSTER_TENANT_LIMITS is not JSON (Expecting property name" in ended.stderr
    assert (len(ended.stderr.splitlines()), ended.returncode) == (1, 2), ended.stderr


def run(folder: Path, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as a process; `stderr` has its stdout too, which stays empty."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")}
    log = folder / "output"
    status = fork_server.start(command[0], command[1:], kept | {"COLUMNS": "1000", **environment}, log).wait(60)
    return subprocess.CompletedProcess(command, status, stderr=log.read_text("utf-8"))
