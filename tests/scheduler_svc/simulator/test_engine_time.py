"""Skipped turns are charged the mean time of sampled turns, which were taken alone."""

from __future__ import annotations

import pytest

from scheduler_svc.simulator.engine_time import SAMPLED, EngineTime


def test_skipped_turns_are_charged_the_mean_of_the_sample() -> None:
    time = EngineTime()
    time.took(0.5, is_sample=False)
    assert time.total_s == 0.5
    for seconds in (0.001, 0.003):
        assert time.wants_sample
        time.took(seconds, is_sample=True)
        for _ in range(SAMPLED):
            time.skipped(10)
    assert time.wants_sample
    assert time.total_s == pytest.approx(0.5 + 0.004 + 2 * SAMPLED * 10 * 0.002)
