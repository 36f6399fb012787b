"""Numbers at the limits of machine types, and generated constraints: each is refused by name or enforced exactly.

Each keyword with each number and type passes through the check of literals into the library, in a process that may
crash; the allowed values are compared with exact arithmetic. Then generated schemas, patterns and grammars are tried.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

from bench.trust.line import Line
from tests.support.grammar_trials import GrammarTrials
from tests.support.random_constraints import random_constraint
from tests.support.schema_numbers import outcome, singles

QUICK_S, FULL_S = 1.5, 120.0
"""Seconds for each half."""


def run(quick: bool) -> Line:
    """Tries as many cases as fit the time, always in the same order."""
    limit_s, rng = QUICK_S if quick else FULL_S, random.Random(17)
    cases = singles()
    rng.shuffle(cases)
    exact: Counter[str] = Counter()
    fuzzed: Counter[str] = Counter()
    with GrammarTrials() as trials:
        trials.run("regex", "a")  # loads the vocabulary
        until = time.monotonic() + limit_s
        while cases and time.monotonic() < until:
            found = outcome(trials, *cases.pop())
            exact[found if found in ("exact", "refused", "died") else "changed"] += 1
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            trial = trials.run(*random_constraint(rng), steps=5)
            slow = trial.died == -signal.SIGALRM
            fuzzed["died" if trial.died and not slow else "too slow" if slow else "served"] += 1
    tried = sum(fuzzed.values())
    return Line(
        promise="a number in a schema is enforced exactly or refused, and no constraint crashes the library",
        figure=f"{exact['changed']} changed and {exact['died']} crashes of {sum(exact.values())} edge cases "
        f"({exact['refused']} refused), {fuzzed['died']} crashes of {tried} generated ({fuzzed['too slow']} too slow)",
        bar="0 changed, 0 crashes",
        met=not exact["changed"] + exact["died"] + fuzzed["died"] and exact["exact"] > 0 and tried > 0,
    )
