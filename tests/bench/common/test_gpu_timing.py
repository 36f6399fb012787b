"""Timing of GPU work, as far as that needs no GPU."""

from __future__ import annotations

import pytest

from bench.common import gpu_timing


def test_a_rest_lies_before_each_median(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    medians = iter([30.0, 20.0])

    def median(replay: object, repeats: int) -> float:
        events.append(repeats)
        return next(medians)

    monkeypatch.setattr(gpu_timing, "captured", lambda *launches: None)
    monkeypatch.setattr(gpu_timing, "median_microseconds", median)
    monkeypatch.setattr(gpu_timing.time, "sleep", events.append)
    assert gpu_timing.graph_microseconds([print, print], repeats=7, rest=0.25) == 10.0
    assert events == [0.25, 7, 0.25, 7]
