"""Pages about steps and kernels, from committed results: header, numbers, the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.common.provenance import write_results
from bench.page import page_of
from bench.steps.times import StepTimes
from tests.support.pages import checked

RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.mark.parametrize("path", sorted([*RESULTS.glob("*-steps.json"), *RESULTS.glob("*00-kernels.json")]))
def test_committed_results_have_a_page(path: Path) -> None:
    record = json.loads(path.read_text())
    name = path.stem.rpartition("-")[2]
    page = checked(page_of(record))
    for said in (record["card"]["card"], record["date"], record["commit"], "torch 2.11.0", f"python -m bench.{name}"):
        assert said in page, said
    assert page.count("<tr") > len(record["rows" if name == "steps" else "results"])


def test_what_steps_writes_has_a_page(tmp_path: Path) -> None:
    row = StepTimes("qwen3-0.6b", "runner", 64, 64, "graph", 2.5, 1.5, 2.0, 10.0, 20.0, 2.25, 0.125, 123_456.0)
    source = {"command": "python -m bench.steps --output x", "date": "today", "commit": "c0ffee"}
    source |= {"versions": {"torch": "9.9"}, "card": {"card": "a <card>"}}
    numbers = {"copy_tb_s": 4.125, "rows": [{name: getattr(row, name) for name in StepTimes.__dataclass_fields__}]}
    write_results(tmp_path / "steps.json", source, numbers)
    page = checked(page_of(json.loads((tmp_path / "steps.json").read_text())))
    for said in (
        "a &lt;card&gt;",
        "2.500",
        "1.250",
        "1.13",
        "10.0\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}20.0",
        "123,456",
        "copy",
        "4.12 TB/s",
        "torch 9.9",
    ):
        assert said in page, said


def test_other_results_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no page for results of bench\.scheduler"):
        page_of({"command": "python -m bench.scheduler --json x"})
