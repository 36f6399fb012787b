"""The sources of the runner's settings, and that each setting is documented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from roster_common.service_command import read_command_line
from roster_common.setting_sources import UnusableSettings
from runner_svc.settings.backend_for_tests import OLD_NAMES, BackendForTests
from runner_svc.settings.runner_settings import RunnerSettings


def read(*flags: str) -> RunnerSettings:
    return read_command_line(RunnerSettings, "roster-runner", "", str, flags)


def test_arguments_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"slots": 3, "block_size": 32, "kv_tokens": 64, "policy": "static"}))
    monkeypatch.setenv("ROSTER_SETTINGS", str(file))
    monkeypatch.setenv("ROSTER_SLOTS", "5")
    monkeypatch.setenv("ROSTER_BLOCK_SIZE", "8")
    settings = RunnerSettings(slots=7)
    assert (settings.slots, settings.block_size, settings.kv_tokens) == (7, 8, 64)


def test_the_command_line_takes_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("auto", "cpu", "cuda", "hash", "null"):
        settings = read("--device", device, "--kv-tokens", "99")
        assert (settings.device, settings.kv_tokens) == (device, 99)


@pytest.mark.parametrize(
    "bad", [{"slots": 0}, {"block_size": 0}, {"device": "tpu"}, {"silence_s": 0}, {"model": ""}, {"context_length": 1}]
)
def test_values_out_of_range_are_refused(bad: dict) -> None:
    with pytest.raises(ValidationError):
        RunnerSettings(**bad)


def test_every_setting_is_described() -> None:
    for name, field in RunnerSettings.model_fields.items():
        assert field.description and field.description.endswith("."), name


def test_the_test_backend_is_one_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members come from the flag, then the variable, then the file."""
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"test_backend": {"step_ms": 1, "vocab_size": 300, "poison_token": 7}}))
    monkeypatch.setenv("ROSTER_SETTINGS", str(file))
    monkeypatch.setenv("ROSTER_TEST_BACKEND", '{"step_ms": 2, "eos_probability": 0}')
    settings = read("--test-backend", '{"poison": "hang", "poison_token": 8}')
    expected = BackendForTests(step_ms=2, vocab_size=300, eos_probability=0, poison="hang", poison_token=8)
    assert settings.test_backend == expected


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('{"step_s": 1}', "setting test_backend.step_s: Extra inputs are not permitted"),
        ('{"vocab_size": 258}', "setting test_backend.vocab_size: Input should be greater than or equal to 259"),
        ("7", "--test-backend is neither a JSON object nor NAME=VALUE"),
    ],
)
def test_invalid_test_backends_are_refused(value: str, why: str) -> None:
    with pytest.raises(UnusableSettings, match=f"^{why}"):
        read(f"--test-backend={value}")


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_old_spellings_name_the_new_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag, variable, file = f"--{name.replace('_', '-')}", f"ROSTER_{name.upper()}", tmp_path / "settings.json"
    new = f'is now part of test_backend: write --test-backend \'{{"{name}": "..."}}\' or ROSTER_TEST_BACKEND='
    for arguments in ([flag, "1"], [f"{flag}=1"]):
        with pytest.raises(UnusableSettings) as refused:
            read(*arguments)
        assert str(refused.value).startswith(f"{flag} {new}")
    file.write_text(json.dumps({name: 1}))
    for key, value in ((variable, "1"), (variable.lower(), "1"), ("ROSTER_SETTINGS", str(file))):
        with monkeypatch.context() as environment:
            environment.setenv(key, value)
            with pytest.raises(UnusableSettings) as refused:
                RunnerSettings.read()
            assert str(refused.value).startswith(f"{name} ({variable}) {new}")
    with pytest.raises(UnusableSettings, match=f"^{name} "):
        RunnerSettings.read(**{name: 1})


def test_help_omits_settings_for_tests(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    told = capsys.readouterr().out
    assert "--slots" in told
    assert not any(name in told for name in ("test-backend", "weights", "step-ms", "poison"))
