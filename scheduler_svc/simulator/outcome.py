"""Outcome of a simulation: the times of each request and token, and the total counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.simulated_front import SimulatedFront
from scheduler_svc.simulator.trace import Trace

Seconds = npt.NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class Counters:
    """Sums over the whole simulation. Times are in seconds: `engine_s` and `wall_s` of wall time, the others of virtual
    time.

    `engine_s` is the engine's time for all turns, as if taken one by one (see `EngineTime`).
    """

    plans: int
    rows: int
    step_tokens: int
    busy_s: float
    slots: int
    runners: int
    preemptions: int
    cached_tokens: int
    policy_failures: int
    decode_rows: int
    drafted_tokens: int
    accepted_tokens: int
    virtual_s: float
    engine_s: float
    wall_s: float


@dataclass(slots=True, frozen=True)
class Outcome:
    """Arrays over the served requests (`served`: their indices in the trace), and over all their tokens."""

    trace: Trace
    counters: Counters
    served: npt.NDArray[np.int64]
    arrival_s: Seconds
    first_token_s: Seconds
    last_token_at: Seconds
    tokens: npt.NDArray[np.int64]
    """Output tokens of each request."""
    token_times_s: Seconds
    """Arrival of each token, by request: those of served[i] are token_times_s[offsets[i]:offsets[i + 1]]."""
    offsets: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    """Tokens of each request's prompt that came from the prefix cache."""
    refusals: dict[int, str]
    """Index of each refused request -> reason."""

    @property
    def ttft_s(self) -> Seconds:
        """Time to first token of each request."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> Seconds:
        """Time from arrival to last token of each request."""
        return self.last_token_at - self.arrival_s

    @property
    def itl_s(self) -> Seconds:
        """All times between consecutive tokens of one request."""
        gaps = np.diff(self.token_times_s)
        keep = np.ones(len(gaps), bool)
        keep[self.offsets[1:-1] - 1] = False
        return gaps[keep]

    @property
    def mean_itl_s(self) -> Seconds:
        """Mean time between tokens of each request; 0 for a request of one token."""
        return (self.last_token_at - self.first_token_s) / np.maximum(1, self.tokens - 1)

    @property
    def tenants(self) -> list[str]:
        """Tenant of each served request."""
        return [self.trace.requests[index].tenant for index in self.served.tolist()]

    def tokens_by(self, tenant: str, until_at: float) -> int:
        """Returns the output tokens that the tenant had received by `until_at`."""
        came = np.concatenate(([0], np.cumsum(self.token_times_s <= until_at)))
        per_request = came[self.offsets[1:]] - came[self.offsets[:-1]]
        return int(per_request[np.array([name == tenant for name in self.tenants], bool)].sum())


def outcome_of(front: SimulatedFront, counters: Counters) -> Outcome:
    """Sorts the tokens by request. Raises RuntimeError if a request did not get exactly its trace's output tokens."""
    ids = np.frombuffer(bytes(front.token_ids), np.uint64)
    times_s = np.repeat(np.frombuffer(front.token_times_s), np.frombuffer(front.token_counts, np.int64))
    first_ids = front.first_ids
    served = np.flatnonzero(first_ids)
    by_id = np.argsort(first_ids[served])  # turns of conversations are not submitted in the trace's order
    index = by_id[np.searchsorted(first_ids[served][by_id], ids)]
    order = np.argsort(index, kind="stable")
    times_s = times_s[order]
    tokens = np.bincount(index, minlength=len(served)).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(tokens)))
    requests = front.trace.requests
    wanted = np.array([requests[i].output_tokens for i in served.tolist()], np.int64)
    if front.ended_early or not np.array_equal(tokens, wanted):
        raise RuntimeError(f"requests ended before they had their tokens: {front.ended_early or (tokens - wanted)}")
    return Outcome(
        trace=front.trace,
        counters=counters,
        served=served,
        arrival_s=front.arrival_s[served],
        first_token_s=times_s[offsets[:-1]],
        last_token_at=times_s[offsets[1:] - 1],
        tokens=tokens,
        token_times_s=times_s,
        offsets=offsets,
        cached_tokens=np.array([front.cached_of[int(first_ids[i])] for i in served.tolist()], np.int64),
        refusals=dict(front.refusals),
    )
