"""What the pages say of a GPU and only a GPU can run: commands that have run."""

from __future__ import annotations

import json
import shlex

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
