"""Every pair of request features, under runner deaths, preemption and Attach."""

from __future__ import annotations

import structlog.testing

from bench.trust.line import Line
from tests.support.pair_table import all_cases, differences, some_cases


def run(quick: bool) -> Line:
    """Tries all cases in about a minute, the quick ones in a few seconds."""
    cases = some_cases(12) if quick else all_cases()
    with structlog.testing.capture_logs():  # suppresses the logs of runners that die
        changed = sum(bool(differences(case)) for case in cases)
    return Line(
        promise="no runner death, preemption or Attach changes an answer, whichever features it combines",
        figure=f"{changed} of {len(cases)} cases differ from an undisturbed run",
        bar="0",
        met=not changed,
    )
