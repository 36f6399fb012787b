"""Broken folders: one sentence and status 2 each."""

from __future__ import annotations

import errno
import os
import pwd
import re
import shutil
import struct
from pathlib import Path

import pytest

from roster_common.setting_sources import UnusableSettings
from runner_svc.model import gguf_conversion
from runner_svc.model.checkpoint.servable import why_not
from runner_svc.model.folder import json_file
from runner_svc.model.folder.cache_folder import writes_cache
from runner_svc.settings.runner_settings import default_cache_folder
from tests.support.broken_folders import BROKEN, sharded
from tests.support.in_this_process import run_runner
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("whole") / "model", num_hidden_layers=1)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def assert_refused(folder: Path, sentence: str, *flags: str) -> None:
    finished = run_runner("--device", "cpu", "--model", str(folder), *flags)
    lines = [line for line in finished.stderr.strip().splitlines() if "[info " not in line]
    assert finished.returncode == 2
    assert len(lines) == 1 and re.search(sentence, lines[0]), finished.stderr


def test_a_whole_folder_is_served(whole: Path, folder: Path) -> None:
    assert why_not(whole) is None
    sharded(folder)
    assert why_not(folder) is None


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_gives_one_sentence(name: str, folder: Path) -> None:
    break_it, sentence = BROKEN[name]
    break_it(folder)
    told = why_not(folder)
    assert told is not None and re.search(sentence, told)
    assert_refused(folder, sentence)


def test_a_configuration_cut_off_anywhere(folder: Path) -> None:
    path = folder / "config.json"
    content = path.read_text().rstrip()
    for end in range(0, len(content), 7):
        path.write_text(content[:end])
        told = why_not(folder, has_weights=False)
        assert told is not None and ("is not valid JSON" in told or "is empty" in told), end


def test_weights_cut_off_at_each_boundary(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    boundaries = {*range(10), *range(8, 8 + length, 97), *range(8 + length, len(content), 4999), len(content) - 1}
    for end in sorted(boundaries, reverse=True):
        os.truncate(path, end)
        told = why_not(folder)
        assert told is not None and "model.safetensors is cut off" in told, end


def test_a_file_that_can_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read all files
    told = why_not(folder)
    assert told is not None and told.endswith("config.json can't be read (Permission denied): change its permissions.")


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    assert why_not(tmp_path) == f"{tmp_path} has no config.json."


@pytest.mark.parametrize("cache", ["/proc/none", "{file}"])
def test_a_cache_folder_that_can_not_be_made(cache: str, tmp_path: Path) -> None:
    gguf_file = write_tiny_gguf(tmp_path / "tiny.gguf")
    path = cache.format(file=Path(__file__))
    sentence = f"cache_dir is '{path}', where the converted model can't be written"
    assert_refused(gguf_file, sentence, "--cache-dir", path, "--runner-id", "a")


@pytest.mark.parametrize(
    "raised", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("I/O error: ... (os error 28)")]
)
def test_a_cache_folder_that_is_full(raised: Exception) -> None:
    @writes_cache
    def write(source: Path, folder: Path) -> None:
        raise raised

    with pytest.raises(UnusableSettings, match=r"cache_dir is '/cache'.*No space left on device.*set cache_dir"):
        write(Path("/a.gguf"), Path("/cache"))


@pytest.mark.parametrize("name", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"])
def test_the_source_is_not_the_caches_fault(name: str) -> None:
    @writes_cache
    def write(source: Path, folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(source.with_name(name)))

    with pytest.raises(PermissionError):
        write(Path("/a-00001-of-00002.gguf"), Path("/cache"))
    assert gguf_conversion.converted_folder.__wrapped__  # type: ignore[attr-defined]


def test_a_user_without_a_home(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_cache_folder() == Path("/nonexistent/.cache/roster")
    assert_refused(Path("~/model"), "There is no model '~/model'", "--cache-dir", str(whole))


def test_other_files_are_read_as_json(tmp_path: Path) -> None:
    assert json_file.read_object(tmp_path / "none.json") == {}
