"""The protocol between scheduler and runner (plan.proto): its version, a row's flags, what the link has got since.

A feature is used only with a peer that has named it. Those of a runner that is there are
`shared(scheduler.hello.features)`.
"""

from __future__ import annotations

from collections.abc import Iterable

PROTOCOL_VERSION = 1

SAMPLE_FLAG = 1
"""Extent flag: a token is sampled after the row's last position."""
AWAIT_FLAG = 2
"""Extent flag: the row waits for its mask before sampling."""

TERMS = "terms"
"""Terms have ids, and pings tell the greatest."""
CONTEXTS = "contexts"
"""Pings tell the longest context that a runner of the service had."""

OURS = frozenset({TERMS, CONTEXTS})


def shared(theirs: Iterable[str]) -> frozenset[str]:
    """The features that both sides have."""
    return OURS.intersection(theirs)
