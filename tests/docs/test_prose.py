"""The word check finds what it lists, where prose is, and nothing in code."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import check_prose

PYTHON = '''"""A sequence, whoever it belongs to."""

NAMES = "nobody is here"


def find(anew: str) -> str:
    return anew  # nobody reads `somebody`, but `who`
'''


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    return tmp_path


def words(root: Path, name: str, source: str) -> list[str]:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, "utf-8")
    return [line.split("'")[1] for line in check_prose.find_words(path)]


def test_docstrings_and_comments_are_read_and_code_is_not(root: Path) -> None:
    assert words(root, "a.py", PYTHON) == ["whoever", "nobody"]


def test_messages_of_the_product_are_read(root: Path) -> None:
    assert words(root, f"{check_prose.PRODUCT[0]}/a.py", PYTHON) == ["whoever", "nobody", "nobody"]


def test_pages_are_read_outside_fences_and_backquotes(root: Path) -> None:
    page = "It is told `anew` of [a seat](https://who.example).\n```sh\nwho\n```\nNobody.\n"
    assert words(root, "a.md", page) == ["is told", "seat", "Nobody"]


@pytest.mark.parametrize("name", ["a.proto", "a.cu", "compose.yaml", "Makefile", "Dockerfile.runner"])
def test_comments_of_other_files_are_read(root: Path, name: str) -> None:
    sign = "//" if name.startswith("a.") else "#"
    assert words(root, name, f"who = 1  {sign} started anew\n") == ["anew"]
