"""Early refusals compared with the times of the same requests when they are admitted after all."""

from __future__ import annotations

from bench.trust.line import Line
from tests.support.refusal_mixes import FORESEEABLE
from tests.support.refusal_trials import trials
from tests.support.refusal_verdicts import share


def run(quick: bool) -> Line:
    """Runs several mixes of loads on a virtual clock; see `tests/support/refusal_trials.py`."""
    mixes, seeds, seconds = (["all"], range(3, 4), 60.0) if quick else (FORESEEABLE, range(3), 60.0)
    report = trials(mixes, seeds, seconds)
    wrongly, rightly = share(report.wrongly, report.met), share(report.rightly, report.missed)
    retries = share(report.true_times, len(report.timed))
    return Line(
        promise="a refusal for a deadline is correct",
        figure=(
            f"{report.met:.0f} meet it: {wrongly:.2%} refused; {report.missed:.0f} miss it: {rightly:.0%} refused; "
            f"RetryInfo correct for {retries:.0%} of {len(report.timed)}; {report.kept_met} of {report.kept} that were "
            "accepted as promised met it"
        ),
        bar="1%, 80%, 95%; 80%",
        met=wrongly <= 0.01 and rightly >= 0.8 and retries >= 0.95 and report.kept_met >= 0.8 * report.kept,
    )
