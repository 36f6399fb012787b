"""Tenants share the compiler's time: a flood delays its own tenant."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.constrained.compile_line import REMEMBERED, CompileLine
from tests.support.thoroughness import count


def test_first_in_first_out_within_a_tenant() -> None:
    line: CompileLine[int] = CompileLine()
    for job in range(5):
        line.push("a", job)
    assert len(line) == 5
    assert [line.pop() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    assert len(line) == 0


def test_tenants_get_equal_time_however_unlike_their_jobs() -> None:
    line: CompileLine[str] = CompileLine()
    seconds = {"dear": 1.0, "cheap": 0.1}
    for _ in range(1000):
        line.push("dear", "dear")
        line.push("cheap", "cheap")
    served = dict.fromkeys(seconds, 0.0)
    for _ in range(110):
        tenant = line.pop() or ""
        served[tenant] += seconds[tenant]
        line.charge(tenant, seconds[tenant])
    assert abs(served["dear"] - served["cheap"]) <= 1.0 + 1e-9


def test_idleness_earns_no_credit() -> None:
    """A tenant that joins after an hour of another's work gets half of the time from then on, not an hour first."""
    line: CompileLine[str] = CompileLine()
    for _ in range(5000):
        line.push("busy", "busy")
    for _ in range(3600):
        assert line.pop() == "busy"
        line.charge("busy", 1.0)
    for _ in range(100):
        line.push("late", "late")
    order = []
    for _ in range(100):
        tenant = line.pop() or ""
        order.append(tenant)
        line.charge(tenant, 1.0)
    assert 49 <= order.count("late") <= 51


def test_a_debt_outlives_a_pause() -> None:
    """A tenant whose job took long does not go first again by becoming idle until the job is done."""
    line: CompileLine[str] = CompileLine()
    line.push("dear", "dear")
    assert line.pop() == "dear"
    for number in range(20):
        line.push("cheap", f"cheap {number}")
    line.charge("dear", 10.0)
    line.push("dear", "dear again")
    for number in range(20):
        assert line.pop() == f"cheap {number}"
        line.charge("cheap", 0.1)
    assert line.pop() == "dear again"


def test_a_tenant_without_a_running_job_is_charged_nothing() -> None:
    line: CompileLine[int] = CompileLine()
    line.push("a", 1)
    for tenant in ("a", "b"):
        with pytest.raises(KeyError):
            line.charge(tenant, 1.0)


def test_idle_tenants_are_forgotten() -> None:
    line: CompileLine[str] = CompileLine()
    for name in ["always", "always", *(f"tenant {number}" for number in range(3 * REMEMBERED))]:
        line.push(name, name)
    most = 0
    while (job := line.pop()) is not None:
        line.charge(job, 1.0)
        most = max(most, line.num_tenants - len(line))
    assert REMEMBERED // 2 < most <= REMEMBERED + 1
    assert line.num_tenants == 0


def jobs_before(rng: random.Random, floods: int) -> int:
    """Returns the number of others' jobs that begin between the arrival of a newcomer's only job and its begin."""
    line: CompileLine[tuple[str, float]] = CompileLine()
    at_work: list[tuple[str, float]] = []
    compilers = rng.choice((1, 1, 2, 3))

    def turn() -> str | None:
        """Adds a job of a flood, ends one if all compilers are busy, and begins another; returns its tenant."""
        flood = f"flood {rng.randrange(floods)}"
        for _ in range(rng.choice((0, 1, 30))):
            line.push(flood, (flood, rng.choice((0.001, 0.1, 1.0)) * rng.random()))
        if len(at_work) == compilers:
            line.charge(*at_work.pop(rng.randrange(compilers)))
        job = line.pop()
        if job is None:
            return None
        at_work.append(job)
        return job[0]

    for _ in range(rng.randrange(200)):
        turn()
    line.push("newcomer", ("newcomer", 0.01))
    begun = 0
    while (tenant := turn()) != "newcomer":
        begun += tenant is not None
    return begun


def test_a_flood_delays_others_by_one_job_at_most() -> None:
    for seed in range(count(20_000, in_ci=200)):
        rng = random.Random(seed)
        floods = rng.choice((1, 1, 2, 5))
        assert jobs_before(rng, floods) <= floods, seed
