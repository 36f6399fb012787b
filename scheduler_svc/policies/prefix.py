"""Longest cached prefix first (SGLang's cache-aware order: Zheng et al., 2024), without starving cold requests.

What is cached changes with every step and differs between runners, so it can't be a key: the queue stays in order of
arrival, and the first `window` of it are reordered whenever somebody may be seated. A request that has waited
`max_wait_s` goes before all that have not, so hot prefixes delay a cold request by at most that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from scheduler_svc.policy import Policy, PolicyParameters, WaitingView


class PrefixParameters(PolicyParameters):
    """Parameters of `prefix`."""

    window: int = Field(default=16, ge=1, le=256, description="Requests at the head of the queue that are reordered.")
    max_wait_s: float = Field(
        default=10.0, ge=0, description="A request that has waited this many seconds goes before those that have not."
    )


class Prefix(Policy):
    """Reuses what is cached before it is evicted. Needs prefix sharing; without it, first come, first served."""

    name = "prefix"
    Parameters = PrefixParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.rerank_window = parameters.window

    def rerank(self, head: Sequence[WaitingView]) -> Sequence[WaitingView]:
        """Those that have waited too long by rank, then the others by cached tokens, then by rank."""
        max_wait_s = self.parameters.max_wait_s
        return sorted(head, key=lambda view: (-view.cached if view.waited_s < max_wait_s else float("-inf"), view.rank))
