"""`bench.trust` prints a line for each guarantee, and its exit status shows whether all bars were met."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench.trust import __main__ as trust
from bench.trust import lines
from bench.trust.line import Line

PROMISES = {
    "ill_runner", "late_writes", "mask_process", "pair_table", "policy_swap", "refusals", "same_id", "schema_fuzz",
    "unlike_pools",
}  # fmt: skip


def test_each_promise_has_its_line() -> None:
    assert set(trust.NAMES) == PROMISES


@pytest.mark.parametrize("met", [True, False])
def test_a_missed_bar_is_the_exit_status(
    met: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[bool] = []

    def run(quick: bool) -> Line:
        tried.append(quick)
        return Line("nothing is lost", "0 of 3", "0", met)

    module = ModuleType("same_id")
    monkeypatch.setattr(module, "run", run, raising=False)
    monkeypatch.setitem(sys.modules, f"{lines.__name__}.same_id", module)
    monkeypatch.setenv("ROSTER_COMMIT", "0123456789")
    monkeypatch.setattr(
        sys, "argv", ["bench.trust", "--quick", "--only", "same_id", "--json", str(tmp_path / "figures.json")]
    )
    assert trust.main() == (not met)
    assert tried == [True]
    assert ("MISSED" in capsys.readouterr().out) == (not met)
    (line,) = json.loads((tmp_path / "figures.json").read_text())["lines"]
    assert (line["name"], line["figure"], line["met"]) == ("same_id", "0 of 3", met)
