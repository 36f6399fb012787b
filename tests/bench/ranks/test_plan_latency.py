"""The benchmark's processes all receive each plan, and it says when ranks hold a plan too late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.ranks.__main__ import complaint, percentiles
from tests.support.import_graph import ROOT
from tests.support.thoroughness import choice


@pytest.mark.parametrize(("ranks", "nodes"), choice([(2, 1), (4, 1), (4, 2)], in_ci=[(2, 1), (4, 1)]))
def test_figures_of_a_short_run(tmp_path: Path, ranks: int, nodes: int) -> None:
    output = tmp_path / "ranks.json"
    command = [sys.executable, "-m", "bench.ranks", f"--ranks={ranks}", f"--nodes={nodes}", "--plans=260"]
    command.append(f"--output={output}")
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True)
    figures = json.loads(output.read_text())
    assert figures["ranks"] == ranks and figures["plan_bytes"] > 800
    for name in ("hop_us", "spread_us", "broadcast_us"):
        assert 0 < figures[name]["p50"] <= figures[name]["p99"] < 1e6


@pytest.mark.parametrize(
    ("spread", "hop", "cores", "told"),
    [(90.0, 50.0, 16, ""), (101.0, 90.0, 16, "not 100.0 us"), (120.0, 81.0, 2, ""), (120.0, 79.0, 2, "not 118.5 us")],
)
def test_late_plans_are_told(spread: float, hop: float, cores: int, told: str) -> None:
    figures: dict[str, object] = {"spread_us": {"p50": spread}, "hop_us": {"p50": hop}}
    complained = complaint(figures, cores)
    assert bool(complained) == bool(told) and told in complained


def test_percentiles_are_microseconds() -> None:
    import numpy as np

    assert percentiles(np.arange(1000, 102000, 1000)) == {"p50": 51.0, "p90": 91.0, "p99": 100.0}
