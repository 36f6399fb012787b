"""Rates and latencies between two snapshots of a service."""

from __future__ import annotations

import json
import random

import pytest

from roster_client.top.load import WINDOW_S, Latency, RecentLooks, as_json, load_between, quantile
from roster_protos import admin_pb2


def look(time_s: float, sampled: int = 0, prefill: int = 0, **fields: object) -> admin_pb2.WatchRosterResponse:
    totals = admin_pb2.Totals(sampled_tokens=sampled, prefill_tokens=prefill)
    status = admin_pb2.GetStatusResponse(policy="fcfs", totals=totals)
    return admin_pb2.WatchRosterResponse(time_s=time_s, status=status, **fields)  # type: ignore[arg-type]


def test_quantiles_are_within_the_bucket_of_the_true_ones() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    bounds = [0.1 * 1.5**power for power in range(12)]
    values = sorted(rng.uniform(0, 8) for _ in range(500))
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[sum(bound < value for bound in bounds)] += 1
    for share in (0.01, 0.5, 0.9, 0.99):
        found, true = quantile(bounds, counts, share), values[int(share * len(values)) - 1]
        index = sum(bound < true for bound in bounds)
        assert found is not None
        assert ([0.0, *bounds][index]) <= found <= bounds[index]


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([4, 0, 0], 0.5, 0.5),
        ([0, 4, 0], 0.5, 2.0),
        ([0, 4, 0], 1.0, 3.0),
        ([1, 0, 3], 0.5, 3.0),
        ([0, 0, 3], 0.5, 3.0),
    ],
)
def test_quantiles_of_few_values(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile([1.0, 3.0], counts, share) == expected


def test_the_load_between_two_snapshots() -> None:
    bounds = [1.0, 3.0]
    before = look(10, 100, 1000, ttft_s=admin_pb2.Histogram(bounds=bounds, counts=[5, 5, 0]), run_s=4, idle_s=4)
    now = look(14, 300, 1400, ttft_s=admin_pb2.Histogram(bounds=bounds, counts=[9, 5, 0]), run_s=7, idle_s=5)
    load = load_between(before, now)
    assert (load.window_s, load.sampled_per_s, load.prefill_per_s, load.busy_share) == (4, 50, 100, 0.75)
    assert load.ttft == Latency(0.5, 0.99), "only measurements in between"
    assert load.itl == Latency(None, None)
    same = load_between(now, now)
    assert (same.window_s, same.sampled_per_s, same.busy_share) == (0, 0, 0)
    assert (load.accepted_share, load.tokens_per_row) == (None, 1)


def test_drafts_between_two_snapshots() -> None:
    before, now = look(10), look(14)
    before.status.totals.MergeFrom(admin_pb2.Totals(drafted_tokens=100, accepted_tokens=90, decode_rows=50))
    now.status.totals.MergeFrom(admin_pb2.Totals(drafted_tokens=300, accepted_tokens=140, decode_rows=150))
    load = load_between(before, now)
    assert (load.accepted_share, load.tokens_per_row) == (0.25, 1.5)
    assert as_json(load)["accepted_share"] == 0.25


def test_the_window_is_bounded_and_ends_with_a_restart() -> None:
    looks = RecentLooks()
    for second in range(100):
        load = looks.take(look(second, sampled=7 * second))
        assert load.window_s == min(second, WINDOW_S)
        assert load.sampled_per_s == (7 if second else 0)
    restarted = looks.take(look(3, sampled=1))
    assert (restarted.window_s, restarted.sampled_per_s) == (0, 0)


def test_json_names_everything_that_a_frame_shows() -> None:
    row = admin_pb2.RunningSequence(
        sequence=admin_pb2.SequenceRef(request_id="q", slot=3), tenant="t", kind=admin_pb2.ROW_KIND_PREFILL, computed=5
    )
    now = look(1, running=[row], waiting=[admin_pb2.TenantQueue(tenant="t", waiting=2)])
    content = json.loads(json.dumps(as_json(load_between(now, now))))
    assert content["waiting_by_tenant"] == {"t": 2} and content["policy"] == "fcfs"
    assert content["ttft_s"] == {"p50": None, "p99": None}
    (shown,) = content["running"]
    assert (shown["request"], shown["slot"], shown["phase"], shown["computed"]) == ("q", 3, "prefill", 5)
