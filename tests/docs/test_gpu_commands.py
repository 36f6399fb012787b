"""Commands on the pages that need a GPU are those that were run on one."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch

from tests.support.documented_commands import ROOT, documented_commands


def test_the_served_gpu_configuration_is_that_of_the_page() -> None:
    commands = [one.text for one in documented_commands()]
    shown = [shlex.split(text) for text in commands if text.startswith("python -m bench.gpu_serving --")]
    assert len(shown) == 2
    for words in shown:
        result = ROOT / "bench" / "results" / f"2026-11-28-h200-{words[-1]}"
        assert options(words) == options(shlex.split(json.loads(result.read_text("utf-8"))["command"]))


def options(words: list[str]) -> set[str]:
    """Returns each option with its values, regardless of order."""
    return set(" ".join(words).split(" --"))


def test_one_command_runs_all_gpu_tests() -> None:
    shown = subprocess.run(
        ["make", "-C", ROOT, "-n", "test-gpu", "PYTHON=python"], capture_output=True, text=True, check=True
    ).stdout
    named = set(re.findall(r"tests/\S+", shown))
    assert [name for name in named if not (ROOT / name).exists()] == []
    models = next(line for line in shown.splitlines() if "ROSTER_TEST_DEVICE=cuda" in line)
    (page,) = (
        one.text
        for one in documented_commands()
        if one.page == "docs/kernels.md" and one.text.startswith("ROSTER_TEST_DEVICE=cuda pytest")
    )
    assert set(re.findall(r"tests/\S+", models)) == set(re.findall(r"tests/\S+", page))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_names_what_to_install() -> None:
    run = subprocess.run(
        ["make", "-C", ROOT, "test-gpu", f"PYTHON={sys.executable}"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "finds no GPU: install roster-serve[scheduler,runner,cuda,dev]" in run.stderr
