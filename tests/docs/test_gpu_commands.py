"""What the pages say of a GPU and only a GPU can run: commands that have run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch

from tests.support.documented_commands import ROOT, documented_commands


def test_what_served_on_a_gpu_is_what_the_page_shows() -> None:
    commands = [one.text for one in documented_commands()]
    shown = [shlex.split(text) for text in commands if text.startswith("python -m bench.gpu_serving --")]
    assert len(shown) == 2
    for words in shown:
        result = ROOT / "bench" / "results" / f"2026-11-28-h200-{words[-1]}"
        assert options(words) == options(shlex.split(json.loads(result.read_text("utf-8"))["command"]))


def options(words: list[str]) -> set[str]:
    """Each option with its values, whatever their order."""
    return set(" ".join(words).split(" --"))


def test_one_command_tests_all_that_needs_a_gpu() -> None:
    shown = subprocess.run(
        ["make", "-C", ROOT, "-n", "test-gpu", "PYTHON=python"], capture_output=True, text=True, check=True
    ).stdout
    named = set(re.findall(r"tests/\S+", shown))
    assert [name for name in named if not (ROOT / name).exists()] == []
    models = next(line for line in shown.splitlines() if "ROSTER_TEST_DEVICE=cuda" in line)
    (page,) = (one.text for one in documented_commands() if one.text.startswith("ROSTER_TEST_DEVICE=cuda pytest"))
    assert set(re.findall(r"tests/\S+", models)) == set(re.findall(r"tests/\S+", page))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_install() -> None:
    run = subprocess.run(
        ["make", "-C", ROOT, "test-gpu", f"PYTHON={sys.executable}"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "finds no GPU: install roster-serve[scheduler,runner,cuda,dev]" in run.stderr
