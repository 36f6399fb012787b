"""Command lines made from settings: each field is an option, in the groups of the page, and flags take precedence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_common.service_command import read_command_line
from roster_common.setting_levels import TITLES, level_of
from roster_common.setting_options import as_arguments, spelling
from roster_common.setting_sources import ServiceSettings, UnusableSettings
from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

SERVICES: dict[str, type[ServiceSettings]] = {"roster-scheduler": SchedulerSettings, "roster-runner": RunnerSettings}


def read(name: str, *flags: str) -> ServiceSettings:
    return read_command_line(SERVICES[name], name, "about", str, flags)


def shown(text: str) -> list[tuple[str, str]]:
    """Returns the group and the long option of each line of a help page."""
    found, group = [], ""
    for line in text.splitlines():
        if title := re.match(r"╭─ ([\w ]+) ─", line):
            group = title[1]
        elif option := re.match(r"│ (--[\w-]+)", line):
            found.append((group, option[1]))
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_help_has_every_setting_in_its_group(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="0"):
        read(name, "--help")
    expected = [
        (TITLES[level], spelling(field, setting).partition("/")[0])
        for level in TITLES
        for field, setting in SERVICES[name].model_fields.items()
        if level_of(setting) == level
    ]
    assert [line for line in shown(capsys.readouterr().out) if line[0] in TITLES.values()] == expected
    serve = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    assert {option for _, option in expected} <= {option for _, option in shown(serve)}


def test_flags_win_over_variables_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"depth": 1, "drain_s": 1, "stall_s": 1, "prefix_sharing": False, "slots": 3}))
    monkeypatch.setenv("ROSTER_SETTINGS", str(file))
    monkeypatch.setenv("ROSTER_DEPTH", "2")
    monkeypatch.setenv("ROSTER_DRAIN_S", "2")
    settings = read("roster-scheduler", "--depth=3", "--prefix-sharing")
    assert settings.model_dump(include={"depth", "drain_s", "stall_s", "prefix_sharing"}) == {
        "depth": 3, "drain_s": 2, "stall_s": 1, "prefix_sharing": True,
    }  # fmt: skip
    assert read("roster-runner").model_dump(include={"slots"}) == {"slots": 3}
    monkeypatch.setenv("ROSTER_SLOTS", "5")
    assert read("roster-runner", "--slots", "none").model_dump(include={"slots"}) == {"slots": None}


def test_json_and_names_with_values() -> None:
    given = ('--policy-parameters={"a": 1, "b": {"c": [2]}}', "--policy-parameters", "a=2", "--policy-parameters=d=x=y")
    settings = read("roster-scheduler", *given)
    assert settings.model_dump()["policy_parameters"] == {"a": 2, "b": {"c": [2]}, "d": "x=y"}


def test_arguments_of_settings_are_read_as_the_settings() -> None:
    values = {
        "listen": "[::1]:1", "insecure": True, "prefix_sharing": False, "plan_lead_ms": None, "flush_ms": 2.5,
        "policy_parameters": {"a": [1, "b"]}, "admin_listen": "",
    }  # fmt: skip
    assert read("roster-scheduler", *as_arguments(values)).model_dump(include=set(values)) == values


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--flush-mss=1", "No such option: --flush-mss (Possible options: --flush-ms); see `roster-scheduler --help`"),
        ("--insecure=true", "Option '--insecure' does not take a value; see `roster-scheduler --help`"),
        ("surplus", "Got unexpected extra argument(s) (surplus); see `roster-scheduler --help`"),
        ("--depth", "Option '--depth' requires an argument; see `roster-scheduler --help`"),
    ],
)
def test_command_lines_that_can_not_be_understood(flag: str, sentence: str) -> None:
    with pytest.raises(UnusableSettings) as refused:
        read("roster-scheduler", flag)
    assert str(refused.value) == sentence
