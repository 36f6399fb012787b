"""Limits of the pages' lengths and of the committed results."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES, MOST_BYTES, MOST_FILE_BYTES = 15, 1_000_000, 50_000


def results() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "bench/results"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in listed.stdout.split() if (path := ROOT / name).is_file()]


def test_few_results_are_kept() -> None:
    sizes = {path.name: path.stat().st_size for path in results()}
    assert 0 < len(sizes) <= MOST_FILES
    assert sum(sizes.values()) <= MOST_BYTES
    assert {name: size for name, size in sizes.items() if size > MOST_FILE_BYTES} == {}


def test_a_document_quotes_each_result() -> None:
    pages = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert [path.name for path in results() if path.name not in pages] == []


def test_a_page_shows_each_image() -> None:
    pages = "".join(page.read_text("utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert [path.name for path in (ROOT / "docs" / "images").iterdir() if f"images/{path.name}" not in pages] == []


@pytest.mark.parametrize(("page", "lines"), [("README.md", 150), ("bench/NOTES.md", 150)])
def test_pages_stay_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text("utf-8").splitlines()) <= lines
