"""What the comparison of two clients says of their numbers."""

from __future__ import annotations

import pytest

from bench.client_agreement import BAR, Measured, compared


def test_means_and_medians_are_judged() -> None:
    here = Measured([0.1, 0.1, 0.4], [0.020, 0.020, 0.020], 96)
    there = Measured([0.105, 0.105, 0.42], [0.023, 0.023, 0.023], 96)
    rows = {row["measure"]: row for row in compared({"ours": here, "guidellm": there})}
    assert list(rows) == ["TTFT mean", "TTFT p50", "TTFT p90", "ITL mean", "ITL p50", "ITL p90"]
    assert rows["TTFT mean"]["ours_ms"] == 200.0
    assert rows["TTFT p50"]["difference"] == pytest.approx(0.05)
    assert rows["ITL p50"]["difference"] == pytest.approx(0.15) and rows["ITL p50"]["difference"] > BAR
    assert [name for name, row in rows.items() if row["judged"]] == ["TTFT mean", "TTFT p50", "ITL mean", "ITL p50"]
