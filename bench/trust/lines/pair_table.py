"""Each feature of a request with each other one, under deaths, preemption and Attach."""

from __future__ import annotations

import structlog.testing

from bench.trust.line import Line
from tests.support.pair_table import all_cases, differences, some_cases


def run(quick: bool) -> Line:
    """All cases take about a minute, the quick ones some seconds."""
    cases = some_cases(12) if quick else all_cases()
    with structlog.testing.capture_logs():  # of the runners that die
        changed = sum(bool(differences(case)) for case in cases)
    return Line(
        promise="No death, preemption or Attach changes an answer, whichever features it combines",
        figure=f"{changed} of {len(cases)} cases differ from an undisturbed run",
        bar="0",
        met=not changed,
    )
