"""The search for a rate, and conditions under which there is no gain."""

from __future__ import annotations

import pytest

import bench.policies.claims as claims
from bench.policies.claims import RATE_TOLERANCE, Bench, highest_rate, sharegpt, tokens_per_s
from scheduler_svc.simulator.cost_model import load_cost_model


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(load_cost_model("h200-llama-3.1-8b"), 24)


@pytest.mark.parametrize("wanted", [0.3, 4.0, 77.0])
def test_the_highest_rate_is_found_from_either_side(
    wanted: float, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "normalized_latency_s", lambda lengths, rate, setup, mean: rate)
    found = highest_rate([], wanted, bench.setup("fcfs", 8))
    assert wanted / RATE_TOLERANCE <= found <= wanted


def test_equal_lengths_gain_nothing_and_unequal_ones_do(bench: Bench) -> None:
    def ratio(lengths: claims.Lengths) -> float:
        static, continuous = (tokens_per_s(lengths, bench.setup(policy, 8)) for policy in ("static", "fcfs"))
        return continuous / static

    assert ratio([(32, 40)] * 24) == pytest.approx(1.0, abs=0.02)
    assert ratio([(32, 4), (32, 4), (32, 4), (32, 148)] * 6) > 1.5


def test_reserved_memory_costs_what_its_slots_would_have_given(bench: Bench) -> None:
    lengths = [(64, 32)] * 24
    reserved, paged = (tokens_per_s(lengths, bench.setup("orca", slots, 15_700)) for slots in (7, 256))
    assert 2 < paged / reserved < 24 / 7 + 0.1


def test_sharegpt_like_lengths_have_the_papers_means() -> None:
    prompts, outputs = zip(*sharegpt(4000), strict=True)
    assert sum(prompts) / 4000 == pytest.approx(161, rel=0.06)
    assert sum(outputs) / 4000 == pytest.approx(300, rel=0.08)  # 338 before they are cut at 1,024
