"""Counts of instructions are repeatable, and 20% more work shows as 20%.

The gate's own pieces of work take a minute per count: ROSTER_TEST_BENCH_CHECK=10 checks ten times, with all cores busy,
that the code passes against its own counts and that a slowdown of 20% is caught.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.check.counting import ROOT, NoCounter, instructions_per_unit

TINY = "tests.bench.check.tiny_works"
REPEATS = int(os.environ.get("ROSTER_TEST_BENCH_CHECK", "0"))

needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keeps every core busy with two processes each."""
    spinners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


@needs_valgrind
def test_a_slowdown_shows_and_the_machine_does_not() -> None:
    first = instructions_per_unit(TINY)
    slower = instructions_per_unit(TINY, ["--slowdown=0.2"])
    print(first, slower)
    assert slower["summing"] == pytest.approx(1.2 * first["summing"], rel=0.02)
    assert slower["sorting"] == pytest.approx(first["sorting"], rel=0.005)
    assert 20 * 10 < first["summing"] < 20 * 1000


def test_without_valgrind_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NoCounter, match="install valgrind"):
        instructions_per_unit(TINY)


@needs_valgrind
@pytest.mark.skipif(not REPEATS, reason="set ROSTER_TEST_BENCH_CHECK to the number of repeats")
@pytest.mark.timeout(0)
def test_the_gate_passes_on_a_loaded_machine_and_catches_a_slowdown(tmp_path: Path) -> None:
    def check(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bench.check", f"--expected={tmp_path / 'counts.json'}", *options]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(answer.stdout, answer.stderr)
        return answer

    assert check("--renew").returncode == 0
    with busy_cores():
        for _ in range(REPEATS):
            assert check().returncode == 0
    slower = check("--slowdown=0.2")
    works = json.loads((tmp_path / "counts.json").read_text())["instructions_per_unit"]
    assert slower.returncode == 1
    assert slower.stdout.count("SLOWER") == len(works)
