"""The protocol between scheduler and runner (plan.proto): its version, row flags, and features added later.

A feature is used only with a peer that lists it. The features in use with a connected runner are
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
"""Terms have ids, and pings carry the greatest one."""
CONTEXTS = "contexts"
"""Pings carry the longest context that any runner of the service has had."""

EARLY = "early"
"""Results say how early their plan was ready to compute."""

DRAFTS = "drafts"
"""Plans say how many tokens rows draft, and results how many they drafted. Only runners with a drafter get such plans,
which state Hello.max_drafts, so that neither side needs to look for the feature."""

FORCED = "forced"
"""Plans append tokens to sequences whose grammar admits no other ones."""

TIERS = "tiers"
"""Plans copy blocks between a runner's cache and its host pool, and results name the tickets that are done. Only a
runner that states Hello.num_host_blocks gets such plans."""
TAG_BYTES = 20
"""Bytes of Plan.offload_tags for each block: its name, 16 bytes, and its number of tokens, uint32."""

MOVES = "moves"
"""Runners copy KV blocks from one another. Only runners that state Hello.move_endpoint take part."""
MOVE_KEY_BYTES = 16
"""Bytes of the random key of a move."""

GRAPH_DRAFTS = (1, 3, 5, 7)
"""Drafts per row for which a GPU runner captures graphs, beside the most that it may have: with 4 query heads per KV
head, they fill whole tiles. A step with other numbers is computed as one with the next."""


def graph_drafts(max_drafts: int) -> list[int]:
    """Returns the drafts per row, ascending, for which a GPU runner with at most `max_drafts` captures graphs."""
    return [drafts for drafts in GRAPH_DRAFTS if drafts < max_drafts] + [max_drafts]


OURS = frozenset({TERMS, CONTEXTS, EARLY, DRAFTS, FORCED, TIERS, MOVES})


def shared(theirs: Iterable[str]) -> frozenset[str]:
    """Returns the features that both sides support."""
    return OURS.intersection(theirs)
