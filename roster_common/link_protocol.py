"""The protocol between scheduler and runner (plan.proto): its version, and what the link has got since.

A feature is used only with a peer that has named it. Those of a runner that is there are
`shared(scheduler.hello.features)`.
"""

from __future__ import annotations

from collections.abc import Iterable

PROTOCOL_VERSION = 1

TERMS = "terms"
"""Terms have ids, and pings tell the greatest."""
CONTEXTS = "contexts"
"""Pings tell the longest context that a runner of the service had."""

OURS = frozenset({TERMS, CONTEXTS})


def shared(theirs: Iterable[str]) -> frozenset[str]:
    """The features that both sides have."""
    return OURS.intersection(theirs)
