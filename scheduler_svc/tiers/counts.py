"""What the host tiers of all runners have done, for reports."""

from __future__ import annotations

from dataclasses import dataclass, fields

from scheduler_svc.tiers.tiers import Tiers


@dataclass(slots=True)
class TierCounts:
    """Sums over runners, since the start of the engine."""

    loaded_tokens: int = 0
    """Tokens of admitted sequences whose KV had been loaded for them."""
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    offloaded_blocks: int = 0
    offloaded_bytes: int = 0
    offload_s: float = 0.0
    demoted_blocks: int = 0
    """Blocks evicted from the cache with a copy in the host pool."""
    dropped_blocks: int = 0
    """The same without one, on runners with a host pool."""
    wasted_blocks: int = 0
    """Blocks of loads that failed or were late, or whose sequence was gone, and of offloads that failed."""
    prefetched_blocks: int = 0
    """Blocks that were loaded before a request for them came."""
    unused_blocks: int = 0
    """Those of them that the cache lost before a sequence used them."""

    def add(self, tiers: Tiers | None) -> None:
        """Adds the counts of a runner's host tier, if it has one."""
        if tiers is None:
            return
        loads, offloads = tiers.loads.counts, tiers.offloads.counts
        self.loaded_tokens += loads.hit_tokens
        self.loaded_blocks += loads.blocks
        self.loaded_bytes += loads.blocks * tiers.block_bytes
        self.load_s += loads.seconds
        self.offloaded_blocks += offloads.blocks
        self.offloaded_bytes += offloads.blocks * tiers.block_bytes
        self.offload_s += offloads.seconds
        self.demoted_blocks += offloads.demoted
        self.dropped_blocks += offloads.dropped
        self.wasted_blocks += loads.wasted + offloads.lost
        self.prefetched_blocks += tiers.loads.prefetched.blocks
        self.unused_blocks += tiers.loads.prefetched.unused

    def copy(self) -> TierCounts:
        """Returns a copy."""
        return TierCounts(*(getattr(self, each.name) for each in fields(self)))
