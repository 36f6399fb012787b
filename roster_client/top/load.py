"""The data of `roster top`: a service's state, with rates and latencies between two snapshots of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from roster_protos import admin_pb2

WINDOW_S = 10.0
"""Period over which rates and latencies are computed."""
QUANTILES = (0.5, 0.99)


@dataclass(slots=True, frozen=True)
class Latency:
    """Quantiles in seconds, interpolated in the histogram's buckets; None if nothing was measured."""

    p50_s: float | None
    p99_s: float | None


@dataclass(slots=True, frozen=True)
class Load:
    """State of a service with its recent rates."""

    now: admin_pb2.WatchRosterResponse
    window_s: float
    """Seconds over which rates and latencies were computed; 0 before the second snapshot."""
    sampled_per_s: float
    prefill_per_s: float
    busy_share: float
    """Share of the runners' time in which a step ran, 0 to 1."""
    ttft: Latency
    itl: Latency
    accepted_share: float | None = None
    """Share of the drafted tokens that were accepted, 0 to 1; None if nothing was drafted."""
    tokens_per_row: float = 1.0
    """Tokens per decoding row and step: 1 without accepted drafts and forced tokens."""
    loaded_per_s: float = 0.0
    """Tokens of admitted sequences whose KV came from a host pool."""


class RecentLooks:
    """The snapshots of the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._looks: deque[admin_pb2.WatchRosterResponse] = deque()

    def take(self, look: admin_pb2.WatchRosterResponse) -> Load:
        """Adds the newest snapshot and returns the load. Starts over if its time is lower: the scheduler restarted."""
        looks = self._looks
        if looks and look.time_s < looks[-1].time_s:
            looks.clear()
        looks.append(look)
        while len(looks) > 2 and looks[1].time_s <= look.time_s - WINDOW_S:
            looks.popleft()
        return load_between(looks[0], look)


def load_between(before: admin_pb2.WatchRosterResponse, now: admin_pb2.WatchRosterResponse) -> Load:
    """Returns the load between two snapshots, which may be the same one."""
    seconds = now.time_s - before.time_s
    run_s, idle_s = now.run_s - before.run_s, now.idle_s - before.idle_s

    earlier, totals = before.status.totals, now.status.totals
    drafted = totals.drafted_tokens - earlier.drafted_tokens
    accepted = totals.accepted_tokens - earlier.accepted_tokens
    forced = totals.forced_tokens - earlier.forced_tokens

    def per_s(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return Load(
        now,
        seconds,
        per_s(totals.sampled_tokens - earlier.sampled_tokens),
        per_s(totals.prefill_tokens - earlier.prefill_tokens),
        run_s / (run_s + idle_s) if run_s + idle_s > 0 else 0.0,
        _latency(before.ttft_s, now.ttft_s),
        _latency(before.itl_s, now.itl_s),
        accepted / drafted if drafted else None,
        1 + (accepted + forced) / max(1, totals.decode_rows - earlier.decode_rows),
        per_s(totals.host_tier.loaded_tokens - earlier.host_tier.loaded_tokens),
    )


def quantile(bounds: list[float], counts: list[int], share: float) -> float | None:
    """Returns a quantile of a histogram, assuming an even spread within each bucket; None without values.

    `counts` has one more bucket than `bounds`; values above the last bound count as equal to it.
    """
    wanted, below = share * sum(counts), 0
    if not wanted:
        return None
    for index, bound in enumerate(bounds):
        if counts[index] and below + counts[index] >= wanted:
            lower = bounds[index - 1] if index else 0.0
            return lower + (bound - lower) * (wanted - below) / counts[index]
        below += counts[index]
    return bounds[-1]


def as_json(load: Load) -> dict[str, Any]:
    """Returns the JSON object that `roster top --json` prints: times in seconds, progress in tokens."""
    now, status = load.now, load.now.status
    return {
        "uptime_s": round(status.uptime_s, 3),
        "policy": status.policy,
        "policy_parameters": status.policy_parameters,
        "draining": status.draining,
        "waiting": status.waiting,
        "waiting_by_tenant": {tenant.tenant: tenant.waiting for tenant in now.waiting},
        "window_s": round(load.window_s, 3),
        "sampled_tokens_per_s": round(load.sampled_per_s, 1),
        "prefill_tokens_per_s": round(load.prefill_per_s, 1),
        "busy_share": round(load.busy_share, 4),
        "accepted_share": None if load.accepted_share is None else round(load.accepted_share, 4),
        "tokens_per_row": round(load.tokens_per_row, 3),
        "loaded_tokens_per_s": round(load.loaded_per_s, 1),
        "moved_sequences": status.moves.sequences,
        "ttft_s": {"p50": load.ttft.p50_s, "p99": load.ttft.p99_s},
        "itl_s": {"p50": load.itl.p50_s, "p99": load.itl.p99_s},
        "runners": [_runner(runner) for runner in status.runners],
        "held_back": [_held_back(runner) for runner in status.held_back],
        "groups": [_group(group) for group in status.groups.groups],
        "groups_formed_again": status.groups.formed_again,
        "running": [_running(row) for row in now.running],
    }


def _runner(runner: admin_pb2.RunnerStatus) -> dict[str, Any]:
    return {
        "runner": runner.id,
        "device": runner.device,
        "model": runner.model,
        "running": runner.running,
        "slots": runner.slots,
        "kv_blocks": runner.blocks,
        "kv_free_blocks": runner.free_blocks,
        "kv_cached_blocks": runner.cached_blocks,
        "kv_host_blocks": runner.host_blocks,
        "kv_host_used_blocks": runner.host_used_blocks,
        "conversations": runner.conversations,
        "role": runner.role,
        "plans_in_flight": runner.plans_in_flight,
        "drafter": runner.drafter,
        "max_drafts": runner.max_drafts,
        "draft_gain": round(runner.draft_gain, 3),
    }


def _held_back(runner: admin_pb2.HeldBackRunner) -> dict[str, Any]:
    return {
        "runner": runner.id,
        "losses": runner.losses,
        "reason": runner.reason,
        "present": runner.present,
        "next_probe_s": round(runner.next_probe_s, 3),
    }


def _group(group: admin_pb2.RankGroup) -> dict[str, Any]:
    return {
        "runner": group.id,
        "ranks": group.ranks,
        "epoch": group.epoch,
        "serves": group.serves,
        "lost": group.lost,
        "lost_s": round(group.lost_s, 3) if group.HasField("lost_s") else None,
        "away_s": round(group.away_s, 3),
        "away_because": group.away_because,
    }


def _running(row: admin_pb2.RunningSequence) -> dict[str, Any]:
    return {
        "runner": row.runner,
        "slot": row.sequence.slot,
        "request": row.sequence.request_id,
        "choice": row.sequence.index,
        "tenant": row.tenant,
        "phase": "prefill" if is_prefill(row) else "decode",
        "prompt_tokens": row.prompt_tokens,
        "computed": row.computed,
        "generated": row.generated,
        "max_tokens": row.max_tokens,
        "age_s": round(row.age_s, 3),
        "preemptions": row.preemptions,
        "drafted_tokens": row.drafted_tokens,
        "accepted_tokens": row.accepted_tokens,
    }


def is_prefill(row: admin_pb2.RunningSequence) -> bool:
    """Returns whether the sequence has more to compute than its last token."""
    return row.kind == admin_pb2.ROW_KIND_PREFILL


def _latency(before: admin_pb2.Histogram, now: admin_pb2.Histogram) -> Latency:
    earlier = list(before.counts) or [0] * len(now.counts)
    counts = [count - past for count, past in zip(now.counts, earlier, strict=True)]
    bounds = list(now.bounds)
    return Latency(*(quantile(bounds, counts, share) for share in QUANTILES))
