"""Compiled kernels are kept in the cache folder, and in memory where nothing can be written there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runner_svc.startup.kernel_cache import FOLDER, IN_MEMORY, choose_kernel_cache


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    choose_kernel_cache.cache_clear()
    monkeypatch.setenv(IN_MEMORY, "")
    monkeypatch.setenv(FOLDER, "")
    yield
    choose_kernel_cache.cache_clear()


def test_a_folder_that_can_be_written(tmp_path: Path) -> None:
    choose_kernel_cache(tmp_path / "cache")
    assert not os.environ[IN_MEMORY] and list((tmp_path / "cache" / "kernels").iterdir()) == []
    assert os.environ[FOLDER] == str(tmp_path / "cache" / "kernels")


def test_a_folder_that_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "own"))
    choose_kernel_cache(tmp_path / "cache")
    assert os.environ[FOLDER] == str(tmp_path / "own") and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("folder", ["~/.cupy", "/dev/full/cupy", "/proc/cupy"])
def test_a_folder_that_can_not(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy gets a folder that exists, without which it can't be imported."""
    monkeypatch.setenv(FOLDER, folder)
    with capture_logs() as lines:
        choose_kernel_cache(tmp_path)
        choose_kernel_cache(tmp_path)
    assert os.environ[IN_MEMORY] == "1" and Path(os.environ[FOLDER]).is_dir()
    assert [line["folder"] for line in lines] == [folder]


def test_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", unusable)
    choose_kernel_cache(tmp_path)
    assert os.environ[IN_MEMORY] == "1"
