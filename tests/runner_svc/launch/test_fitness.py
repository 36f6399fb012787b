"""What can't be forked is found: threads, and GPUs in use."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from runner_svc.launch import fitness


def test_a_process_with_threads_is_unfit() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert "threads run once a rank's libraries are imported" in fitness.unfit()
    finally:
        end.set()
        thread.join()


def test_an_open_gpu_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fitness, "_GPU", (str(tmp_path / "nvidia"), str(tmp_path / "dxg")))
    assert not fitness.has_gpus() and fitness.opened_devices() == []
    (tmp_path / "nvidia0").touch()
    assert fitness.has_gpus() and fitness.opened_devices() == []
    with (tmp_path / "nvidia0").open():
        assert fitness.opened_devices() == [str(tmp_path / "nvidia0")]
