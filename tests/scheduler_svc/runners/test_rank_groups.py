"""What the scheduler knows of groups of ranks: how often they form again, and for how long they are away."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from roster_protos import plan_pb2
from scheduler_svc.link.runner_events import Joined, Loss, Lost
from scheduler_svc.metrics.collector import RosterCollector
from scheduler_svc.runners.rank_groups import FORGOTTEN_S, RankGroup, RankGroups
from tests.support.hospital import Hospital

KILLED = "rank 1 (pid 7) was ended by signal 9"


def hello(epoch: int, lost: str = "", ranks: int = 2) -> plan_pb2.Hello:
    return plan_pb2.Hello(runner_id="g", ranks=ranks, epoch=epoch, lost_rank=lost)


def lost(loss: Loss = Loss.FAULT) -> Lost:
    return Lost(5, "it failed", loss)


def test_a_group_that_forms_again() -> None:
    groups = RankGroups()
    groups.join(hello(1), 10.0)
    assert dict(groups.known(11.0)) == {"g": RankGroup(2, 1, "")}
    groups.lose(hello(1), lost(), 20.0)
    assert dict(groups.known(21.0)) == {"g": RankGroup(2, 1, "", away_since_at=20.0, away_because="it failed")}
    groups.join(hello(3, KILLED), 26.0)  # it was given up once more before it served
    assert dict(groups.known(27.0)) == {"g": RankGroup(2, 3, KILLED, lost_at=20.0)}
    assert groups.formed_again == 2 and groups.pauses_s == 6.0


def test_a_link_that_broke_is_no_lost_rank() -> None:
    groups = RankGroups()
    groups.join(hello(2, KILLED), 10.0)
    groups.lose(hello(2), lost(Loss.GONE), 20.0)
    groups.join(hello(2, KILLED), 30.0)
    assert dict(groups.known(31.0)) == {"g": RankGroup(2, 2, KILLED)}, "when is not known: it was before"
    assert groups.formed_again == 0 and groups.pauses_s == 0.0


def test_groups_that_are_not_expected_back() -> None:
    groups = RankGroups()
    groups.join(hello(1), 0.0)
    groups.lose(hello(1), lost(Loss.LEFT), 1.0)
    assert not dict(groups.known(2.0))
    groups.join(hello(4, KILLED), 3.0)
    groups.lose(hello(4), lost(), 4.0)
    assert dict(groups.known(4.0 + FORGOTTEN_S))
    assert not dict(groups.known(4.5 + FORGOTTEN_S))
    groups.join(hello(4, KILLED), 5000.0)
    groups.join(hello(1), 5001.0)  # of another launcher
    assert dict(groups.known(5002.0)) == {"g": RankGroup(2, 1, "")} and groups.formed_again == 0
    groups.join(hello(0, ranks=0), 5003.0)  # one process now
    groups.lose(hello(0, ranks=0), lost(), 5004.0)
    assert not dict(groups.known(5005.0))


def test_the_status_and_the_metrics_have_them() -> None:
    hospital = Hospital("a")
    ((session, scheduler),) = hospital.engine.pool.schedulers.items()
    lifecycle, pool, described = hospital.engine.lifecycle, hospital.engine.pool, scheduler.hello
    pool.groups.join(described, hospital.stack.now_s)
    assert not hospital.engine.reports.status().groups.groups, "one process is no group"
    described.ranks, described.epoch = 4, 1
    pool.groups.join(described, hospital.stack.now_s)
    lifecycle.apply(Lost(session, f"it failed: {KILLED}", Loss.FAULT))
    (group,) = hospital.engine.reports.status().groups.groups
    assert group.id == "a" and group.ranks == 4 and not group.serves and KILLED in group.away_because
    described.epoch, described.lost_rank = 2, KILLED
    lifecycle.apply(Joined(session + 1, described, 0, False))
    found = hospital.engine.reports.status().groups
    (group,) = found.groups
    assert group.serves and group.epoch == 2 and group.lost == KILLED and group.HasField("lost_s")
    assert found.formed_again == 1
    assert lines(hospital) >= {
        'roster_ranks{runner="a"} 4.0', 'roster_group_away{runner="a"} 0.0', "roster_groups_formed_again_total 1.0",
    }  # fmt: skip


def lines(hospital: Hospital) -> set[str]:
    registry = CollectorRegistry()
    registry.register(RosterCollector(hospital.engine.snapshots.take_snapshot))
    return set(generate_latest(registry).decode().splitlines())
