"""Runners of different sizes, replaced at random: every request ends in a bounded number of steps."""

from __future__ import annotations

import logging
from collections import Counter

import structlog

from bench.trust.line import Line
from roster_common.logs import configure_logs
from tests.support.unlike_pools import Hung, PoolWalk


def run(quick: bool) -> Line:
    """Runs walks of the property test by their seeds; a wrong token or a wrong refusal raises AssertionError."""
    num_walks, num_requests, num_hung = (12 if quick else 600), 0, 0
    outcomes: Counter[str] = Counter()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
    )  # there are hundreds of runners
    for seed in range(1, num_walks + 1):
        walk = PoolWalk(seed)
        try:
            walk.go()
        except Hung:
            num_hung += walk.num_hung
        num_requests += walk.num_requests
        outcomes += walk.outcomes
    configure_logs("console", "error")
    told = sum(outcomes.values()) - outcomes["whole"]
    return Line(
        promise="with pools of different sizes each request completes, or ends with a status that says why",
        figure=f"{num_walks} walks, {num_requests} requests, {num_hung} hung "
        f"({outcomes['whole']} choices complete, {told} with a reason)",
        bar="0 hung",
        met=num_hung == 0,
    )
