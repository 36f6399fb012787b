"""Where settings come from, and that each is documented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from runner_svc.settings import RunnerSettings


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
        settings = RunnerSettings(_cli_parse_args=["--device", device, "--kv-tokens", "99"])
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
