"""Copies between the KV cache and the host pool of a simulated runner: two in-order streams with a time for each block.

A plan's tickets begin once all earlier plans have computed, and each waits for those of its direction before it. A
result names the tickets that are done when it is sent.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from roster_protos import plan_pb2
from scheduler_svc.plan.plan_draft import pack


@dataclass(slots=True)
class _Stream:
    """One direction."""

    block_s: float
    free_at: float = 0.0
    ordinal: int = 0
    unnamed: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(when it is done, its ordinal, its microseconds) of the tickets that no result has named."""

    def start(self, counts: bytes, begin_at: float) -> None:
        for num_blocks in np.frombuffer(counts, "<i4").tolist():
            seconds = num_blocks * self.block_s
            self.free_at = max(self.free_at, begin_at) + seconds
            self.ordinal += 1
            self.unnamed.append((self.free_at, self.ordinal, round(seconds * 1e6)))

    def take(self, until_at: float) -> tuple[bytes, bytes]:
        """Returns the columns of the tickets that are done by then."""
        done = []
        while self.unnamed and self.unnamed[0][0] <= until_at:
            done.append(self.unnamed.popleft())
        return pack([ordinal for _, ordinal, _ in done]), pack([us for _, _, us in done])


class SimulatedCopies:
    """The copies of one runner."""

    def __init__(self, load_block_s: float, offload_block_s: float) -> None:
        self._loads, self._offloads = _Stream(load_block_s), _Stream(offload_block_s)

    def start(self, plan: plan_pb2.Plan, begin_at: float) -> None:
        """Starts a plan's tickets; `begin_at`: when all earlier plans have computed."""
        self._loads.start(plan.load_counts, begin_at)
        self._offloads.start(plan.offload_counts, begin_at)

    @property
    def next_done_at(self) -> float:
        """When the next ticket is done that no result has named; infinity if there is none."""
        ends = [stream.unnamed[0][0] for stream in (self._loads, self._offloads) if stream.unnamed]
        return min(ends, default=math.inf)

    def named(self, result: plan_pb2.Result, sent_at: float) -> plan_pb2.Result:
        """Returns the result with the tickets that are done when it is sent."""
        if self.next_done_at > sent_at:
            return result
        named = plan_pb2.Result()
        named.CopyFrom(result)  # others share it
        named.loads_done, named.loads_us = self._loads.take(sent_at)
        named.offloads_done, named.offloads_us = self._offloads.take(sent_at)
        return named
