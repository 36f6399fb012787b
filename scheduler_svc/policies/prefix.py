"""Longest cached prefix first (SGLang's cache-aware order: Zheng et al., 2024), without starving cold requests.

The cached prefixes change with every step and differ between runners, so they cannot be a sort key. The queue stays in
order of arrival, and its first `window` requests are reordered whenever one may be admitted. A request that has waited
`max_wait_s` goes before all that have not, so hot prefixes delay a cold request by at most that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from scheduler_svc.policy import Policy, PolicyParameters, WaitingView


class PrefixParameters(PolicyParameters):
    window: int = Field(default=16, ge=1, le=256, description="Requests at the head of the queue that are reordered.")
    max_wait_s: float = Field(
        default=10.0, ge=0, description="Seconds of waiting after which a request goes first, cached or not."
    )


class Prefix(Policy):
    """Longest cached prefix first, so that prefixes are reused before eviction. Without prefix sharing, first come,
    first served."""

    name = "prefix"
    Parameters = PrefixParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.rerank_window = parameters.window

    def rerank(self, head: Sequence[WaitingView]) -> Sequence[WaitingView]:
        """Returns sequences that have waited `max_wait_s` by rank, then the others by cached tokens and rank."""
        max_wait_s = self.parameters.max_wait_s
        return sorted(head, key=lambda view: (-view.cached if view.waited_s < max_wait_s else float("-inf"), view.rank))
