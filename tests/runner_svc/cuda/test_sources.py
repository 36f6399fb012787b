"""The location of the kernels' sources, and the hash that invalidates compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner_svc.cuda import sources


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    for cached in (sources.kernel_folder, sources.headers_hash):
        cached.cache_clear()
    yield
    for cached in (sources.kernel_folder, sources.headers_hash):
        cached.cache_clear()


def fake_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = folder / "runner_svc"
    package.mkdir()
    monkeypatch.setattr(sources, "PACKAGE", package)
    return package


def write_kernels(parent: Path) -> Path:
    folder = parent / "kernels"
    folder.mkdir()
    (folder / "vector.cuh").write_text("#pragma once\n")
    return folder


def test_a_wheels_own_sources_win_over_a_neighbouring_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = fake_package(tmp_path, monkeypatch)
    beside = write_kernels(tmp_path)
    assert sources.kernel_folder() == beside
    sources.kernel_folder.cache_clear()
    inside = write_kernels(package)
    assert sources.kernel_folder() == inside


def test_a_folder_that_is_only_called_kernels_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch)
    (tmp_path / "kernels").mkdir()
    with pytest.raises(FileNotFoundError, match="no folder of CUDA sources"):
        sources.kernel_folder()


def test_the_hash_changes_with_any_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch)
    folder = write_kernels(tmp_path)
    hashes = {sources.headers_hash()}
    for name, text in (("vector.cuh", "// changed\n"), ("other.cuh", ""), ("other.cuh", "// changed\n")):
        (folder / name).write_text(text)
        sources.headers_hash.cache_clear()
        hashes.add(sources.headers_hash())
    (folder / "kernel.cu").write_text("")  # CuPy itself hashes .cu files
    sources.headers_hash.cache_clear()
    hashes.add(sources.headers_hash())
    assert len(hashes) == 4
