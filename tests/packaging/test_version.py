"""The version is that of pyproject.toml wherever it is repeated, and one command changes it everywhere."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roster_common.distribution import distribution_version

ROOT = Path(__file__).resolve().parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "deploy" / "set_version.py"))
VERSION: str = SCRIPT["project_version"](ROOT)
REPEATED = re.compile(r"roster-(?:scheduler|runner|gateway|serve)(?:==|:)(\d+\.\d[\w.]*)")
"""A package or an image with its version."""


def test_each_file_has_the_projects_version() -> None:
    made = SCRIPT["texts"](ROOT, VERSION)
    assert {str(path) for path, text in made.items() if path.read_text("utf-8") != text} == set(), "make version"
    assert len(made) >= 10 and distribution_version() == VERSION


def test_no_other_file_repeats_it() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    pages = [name for name in listed if name.endswith((".md", ".sh", ".py", ".yaml", ".tpl")) or "Dockerfile" in name]
    known = {str(path.relative_to(ROOT)) for path in SCRIPT["texts"](ROOT, VERSION)}
    found = {name for name in pages if (ROOT / name).exists() and REPEATED.search((ROOT / name).read_text("utf-8"))}
    assert found - known == set(), "derive the version, or add the file to deploy/set_version.py"


def test_the_changelog_begins_with_it() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0] == VERSION


def test_one_command_changes_it_everywhere(tmp_path: Path) -> None:
    for path in SCRIPT["texts"](ROOT, VERSION):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    shutil.copy(ROOT / "deploy" / "set_version.py", tmp_path / "deploy")
    before = {path: path.read_text("utf-8") for path in SCRIPT["texts"](tmp_path, VERSION)}
    subprocess.run([sys.executable, tmp_path / "deploy" / "set_version.py", "12.0.3"], check=True, timeout=60)
    for path, text in before.items():
        old, new = text.splitlines(), path.read_text("utf-8").splitlines()
        changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        assert all(a.replace(VERSION, "12.0.3") == b for a, b in changed), path
        assert not any("roster-" in line and VERSION in line for line in new), path
    assert SCRIPT["project_version"](tmp_path) == "12.0.3"


@pytest.mark.parametrize("version", ["1.0", "1.0.0rc1", "01.0.0", ""])
def test_a_version_that_helm_or_pip_would_refuse_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match="give three numbers"):
        SCRIPT["texts"](ROOT, version)
