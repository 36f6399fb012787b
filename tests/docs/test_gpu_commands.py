"""What the pages say of a GPU and only a GPU can run: that it names what there is, and commands that have run."""

from __future__ import annotations

import json
import re
import shlex

from tests.support.documented_commands import ROOT, documented_commands


def test_every_kernel_is_looked_at_by_compute_sanitizer() -> None:
    """A filter that fits no kernel looks at nothing and ends well, so the names must be the kernels' own."""
    sources = [path.read_text("utf-8") for path in (ROOT / "kernels").glob("*.cu")]
    kernels = [re.search(r'extern "C" __global__[^;{]*?(\w+)\(\n', source) for source in sources]
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8").split("### Under compute-sanitizer")[1]
    rows = re.findall(r"^\| (`.*`) \| (`.*`) \|$", page.split("\n## ")[0], re.M)
    named, files = ([name for row in rows for name in re.findall(r"`(\w+)`", row[column])] for column in (0, 1))
    assert sorted(named) == sorted(kernel[1] for kernel in kernels if kernel)
    assert len(named) == len(sources)
    assert [file for file in files if not (ROOT / "tests" / "gpu" / f"{file}.py").exists()] == []


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
