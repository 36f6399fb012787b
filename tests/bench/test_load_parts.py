"""Parts of a loaded prompt's time, and the times between results, from a record of steps."""

from __future__ import annotations

from dataclasses import fields

from bench.gpu_serving.load_parts import load_parts_ms, step_gaps_ms
from bench.gpu_serving.step_record import StepRecord

MS = 1_000_000


def record(*steps: dict[str, int]) -> StepRecord:
    """Returns a record of steps whose times are given in milliseconds; what is not given is 0."""
    names = [field.name for field in fields(StepRecord)]
    times = ("received", "done", "posted")
    return StepRecord.of([[step.get(name, 0) * (MS if name in times else 1) for name in names] for step in steps])


def test_a_load_is_its_empty_plan_and_the_step_after_it() -> None:
    steps = record(
        {"rows": 0, "received": 103, "done": 124, "posted": 125},
        {"rows": 1, "received": 127, "done": 132, "posted": 133},
        {"rows": 1, "received": 203, "done": 207, "posted": 208},  # a hit: it is no load
    )
    requests = [(100 * MS, 135 * MS), (200 * MS, 210 * MS)]
    assert load_parts_ms(steps, requests) == {
        "request to plan": 3.0,
        "plan to copied": 21.0,
        "copied to plan": 3.0,
        "plan to token": 5.0,
        "token to client": 3.0,
    }
    assert load_parts_ms(steps, requests[1:]) == {}


def test_gaps_are_those_between_results_by_the_rows_of_the_later_step() -> None:
    steps = record({"rows": 8, "done": 4}, {"rows": 9, "done": 17}, {"rows": 8, "done": 10})
    assert step_gaps_ms(steps, 8) == {
        "all": {"count": 2, "p50": 6.5, "p99": 6.99},
        "rows alone": {"count": 1, "p50": 6.0, "p99": 6.0},
        "with a request": {"count": 1, "p50": 7.0, "p99": 7.0},
    }
