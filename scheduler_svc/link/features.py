"""What the link has got since runners were first served: used only with a runner that has named it (plan.proto).

Those of a runner that is there are `shared(scheduler.hello.features)`. `runner_svc/link/features.py` is its twin.
"""

from __future__ import annotations

from collections.abc import Iterable

TERMS = "terms"
"""Terms have ids, and pings tell the greatest."""
CONTEXTS = "contexts"
"""Pings tell the longest context that a runner of the service had."""

OURS = frozenset({TERMS, CONTEXTS})


def shared(theirs: Iterable[str]) -> frozenset[str]:
    """The features that both sides have."""
    return OURS.intersection(theirs)
