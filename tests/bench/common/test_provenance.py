"""Provenance of results: the commit of clones and copies, the only writer, and the committed files."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.common.provenance import REQUIRED, provenance, write_results
from bench.gpu_serving.__main__ import write_loads
from roster_client.bench.runs.provenance import ROOT, commit

KEPT = [
    *(ROOT / "bench" / "results").glob("*.json"),
    *(ROOT / "bench" / "simulator" / "measured").glob("*.json"),
]
SOURCE: dict[str, Any] = {name: name for name in REQUIRED}


# ---------------------------------------------------------------------- the commit


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *names, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a repository with one commit."""
    monkeypatch.delenv("ROSTER_COMMIT", raising=False)
    git(tmp_path, "init", "-q")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    for name in ("code.py", "bench/results/old.json"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_commit_of_a_clone_and_whether_its_code_differs(clone: Path) -> None:
    head = git(clone, "rev-parse", "HEAD")
    assert commit(clone) == head
    (clone / "bench/results/old.json").write_text("2")
    (clone / "bench/results/new.json").write_text("2")
    assert commit(clone) == head  # results of earlier runs do not count
    (clone / "code.py").write_text("2")
    assert commit(clone) == f"{head}-dirty"


def test_new_code_differs_unless_git_ignores_it(clone: Path) -> None:
    head = git(clone, "rev-parse", "HEAD")
    git(clone, "config", "status.showUntrackedFiles", "no")
    (clone / ".git/info/exclude").write_text("*.pyc\n")
    (clone / "code.pyc").touch()
    assert commit(clone) == head
    (clone / "bench" / "new.cu").touch()
    assert commit(clone) == f"{head}-dirty"


def test_what_git_can_not_compare_is_not_called_clean(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = git(clone, "rev-parse", "HEAD")
    (clone / ".git/index").write_text("no index")
    assert commit(clone) == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit(clone) == ""  # no git


def test_a_told_commit_that_is_stale(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = git(clone, "rev-parse", "HEAD")
    monkeypatch.setenv("ROSTER_COMMIT", head)
    assert commit(clone) == head and capsys.readouterr().err == ""
    (clone / "code.py").write_text("2")
    assert commit(clone) == head
    said = f"ROSTER_COMMIT is {head}, but this code is at {head}-dirty: unset it if it is outdated.\n"
    assert capsys.readouterr().err == said


def test_a_copy_is_told_its_commit_and_invents_none(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = clone / "copy"
    copy.mkdir()
    assert commit(copy) == ""  # not the commit of an enclosing repository
    git(copy, "init", "-q")
    assert commit(copy) == ""  # a repository without a commit
    (copy / ".git").rename(copy / "gone")
    (copy / ".git").write_text("gitdir: /nowhere/worktrees/copy")
    assert commit(copy) == ""  # a work tree without its repository
    monkeypatch.setattr("bench.common.provenance.commit", lambda: "")
    assert provenance("bench.x", [])["commit"] == "unknown"
    assert "ROSTER_COMMIT" in capsys.readouterr().err
    monkeypatch.setenv("ROSTER_COMMIT", "c0ffee-dirty")
    assert commit(copy) == commit(clone) == "c0ffee-dirty"


# ---------------------------------------------------------------------- the writer


def test_results_say_where_they_come_from(tmp_path: Path) -> None:
    for card in (None, {"card": "NVIDIA"}):
        write_results(tmp_path / "out.json", provenance("bench.x", ["numpy"], card), {"rows": [1]})
        written = json.loads((tmp_path / "out.json").read_text())
        assert all(written[name] for name in REQUIRED) and written["rows"] == [1]
        assert written["card"]["card"] == (card or {"card": written["processor"]})["card"]
        assert set(written["versions"]) == {"python", "numpy"}


@pytest.mark.parametrize("name", REQUIRED)
def test_results_of_nowhere_are_not_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        write_results(tmp_path / "out.json", {**SOURCE, name: ""}, {})
    with pytest.raises(ValueError, match=name):
        write_results(tmp_path / "out.json", SOURCE, {name: "another"})
    assert not list(tmp_path.iterdir())


# Other writers of JSON: the inputs of runs, counts of instructions, and records' headers and summaries.
OTHER_WRITERS = {
    "compare",
    "common.random_model",
    "serving.pages",
    "check.__main__",
    "client_agreement.__main__",
    "common.provenance",
    "gpu_comparison.peers.load",  # a job for its processes
    "gpu_comparison.peers.servers",  # a tokenizer's configuration
    "speculation.first_layers",  # a model's configuration
    "speculation.medusa_training",  # that of heads
    "speculation.peer",  # a job for its process
    "startup.random_checkpoint",  # a checkpoint's index
    "tensor_parallel.killed",  # a smaller model's configuration
    "tensor_parallel.processes",  # results of ranks
    "tensor_parallel.steps",  # a model's configuration
}


def test_every_benchmark_writes_by_it() -> None:
    folder = ROOT / "bench"
    sources = {
        ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text() for path in folder.rglob("*.py")
    }
    writers = {name for name, text in sources.items() if "write_text(json.dumps" in text or "json.dump(" in text}
    assert writers == OTHER_WRITERS
    for name, text in sources.items():
        if "import provenance" in text and "--output" in text + "--json" in text:
            assert "write_results(" in text or name in OTHER_WRITERS, name


def test_what_the_profiler_saw_outlives_the_next_run(tmp_path: Path) -> None:
    plain, seen = {"load": "decode 64"}, {"load": "decode 64, profiled", "profiler_gap_us": {"p50": 4.2}}
    write_loads(tmp_path / "out.json", SOURCE, {"shape": "s", "loads": [plain, seen]})
    write_loads(tmp_path / "out.json", SOURCE, {"shape": "s", "loads": [plain]})
    loads = {path.name: json.loads(path.read_text())["loads"] for path in tmp_path.iterdir()}
    assert loads == {"out.json": [plain], "out-profiled.json": [seen]}


def test_a_package_that_is_missing_costs_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"numpy": "2.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    def found() -> dict[str, str]:
        versions = provenance("bench.x", ["numpy", "torch", "cupy"])["versions"]
        return {name: versions[name] for name in versions if name != "python"}

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert found() == {"numpy": "2.0", "torch": "not installed", "cupy": "not installed"}
    for name in ("cupy", "cupy-cuda12x", "cupy-cuda13x"):
        installed[name] = "14.2"
        assert found() == {"numpy": "2.0", "torch": "not installed", name: "14.2"}


# ---------------------------------------------------------------------- the files

LACKING = {"2026-11-28-h200-attention-d128.json": {"commit"}}
"""Fields that a file lacks. Instead of `commit` it has `committed_in`, the commit that added the numbers."""


def lacking(record: Mapping[str, Any]) -> set[str]:
    """Returns the missing fields; in old results `processor` stands for the card."""
    missing = {name for name in REQUIRED if record.get(name) in (None, "", {}, "HEAD", "unknown")}
    return missing - {"card"} if record.get("processor") and "card" not in record else missing


@pytest.mark.parametrize("path", sorted(KEPT), ids=lambda path: path.name)
def test_kept_results_say_where_they_come_from(path: Path) -> None:
    record = json.loads(path.read_text())
    assert lacking(record) == LACKING.get(path.name, set())
    assert "commit" not in LACKING.get(path.name, ()) or len(record["committed_in"]) == 40
    if "-cpu-" not in path.name and "-h" in path.name:
        assert path.name.split("-")[3].upper() in record["card"]["card"]
