"""The benchmark of start-up removes only a model that it wrote."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.startup import __main__ as startup


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Returns the folders of the models that are started."""
    started: list[Path] = []
    monkeypatch.setattr(startup, "start", lambda folder, *arguments: started.append(folder) or {})
    monkeypatch.setattr(startup, "write_folder", lambda shape, folder: (folder / "config.json").write_text("{}"))
    monkeypatch.setattr(startup, "write_checkpoint", lambda shape, folder: 0)
    monkeypatch.setattr(sys, "argv", ["startup", "--folder", str(folder), "--warm", "0", "--", "--device", "cpu"])
    startup.main()
    return started


def test_a_model_that_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    assert run(tmp_path, monkeypatch) == [tmp_path]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_model_that_was_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch) == [tmp_path]
    assert not tmp_path.exists()


def test_a_folder_with_other_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_text("weights")
    with pytest.raises(SystemExit, match=r"has files but no config\.json"):
        run(tmp_path, monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
