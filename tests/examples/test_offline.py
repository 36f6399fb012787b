"""The offline examples: the script as a reader runs it, and the requests' fields."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roster_client.batch.bodies import asked
from roster_client.batch.input_file import Line, count_lines, read_lines
from tests.support.thoroughness import FULL

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "offline"


def test_the_requests_are_a_batch() -> None:
    path = FOLDER / "requests.jsonl"
    assert count_lines(path) == 4
    for line in read_lines(path):
        assert isinstance(line, Line) and len(asked(line.url, line.body).requests) == 1


@pytest.mark.skipif(not FULL, reason="starts both services, as tests/roster_client/offline/test_llm.py does in CI")
@pytest.mark.parametrize("source", ["examples/offline/reviews.py", "docs/offline.md"])
def test_the_scripts_run(source: str) -> None:
    text = (ROOT / source).read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0] if source.endswith(".md") else text
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROSTER_DEVICE": "hash"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and len(done.stdout.splitlines()) >= 2, done.stdout + done.stderr
