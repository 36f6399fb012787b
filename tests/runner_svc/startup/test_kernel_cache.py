"""Compiled kernels are kept in memory where CuPy can't write its cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runner_svc.startup.kernel_cache import IN_MEMORY, choose_kernel_cache


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    choose_kernel_cache.cache_clear()
    monkeypatch.setenv(IN_MEMORY, "")
    yield
    choose_kernel_cache.cache_clear()


def test_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    choose_kernel_cache()
    assert not os.environ[IN_MEMORY] and list((tmp_path / ".cupy" / "kernel_cache").iterdir()) == []


@pytest.mark.parametrize("folder", ["~/.cupy", "/dev/full/cupy", "/proc/cupy"])
def test_a_folder_that_can_not(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", folder)
    with capture_logs() as lines:
        choose_kernel_cache()
        choose_kernel_cache()
    assert os.environ[IN_MEMORY] == "1"
    assert [line["folder"] for line in lines] == [folder]


def test_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", unusable)
    choose_kernel_cache()
    assert os.environ[IN_MEMORY] == "1"
