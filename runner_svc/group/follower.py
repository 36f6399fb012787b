"""What ranks other than 0 do: each call of rank 0, with the same runner, whose results go nowhere."""

from __future__ import annotations

from collections import deque

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.group.member import Member
from runner_svc.group.rank_runner import RankRunner
from runner_svc.group.records import Kind, Record
from runner_svc.interface.ranks import RankLost


class Follower:
    """Replays rank 0's records on this rank's runner."""

    def __init__(self, member: Member, runner: RankRunner) -> None:
        self._member, self._runner = member, runner
        self._plans: deque[LaunchedPlan] = deque()
        member.ring.meanwhile = runner.look_at_copies

    def run(self) -> None:
        """Returns when rank 0 has drained. Raises RankLost when the epoch is given up, by this rank or another one."""
        while (record := Record.read(self._member.ring.read())).kind is not Kind.STOP:
            try:
                self._do(record)
            except PlanFault as fault:
                self._member.give_up(f"rank {self._member.shard.rank}: {fault}")
                raise RankLost(self._runner.lost) from fault

    def _do(self, record: Record) -> None:
        if record.kind is Kind.LAUNCH:
            self._plans.append(self._runner.launch(record.number, plan_pb2.Plan.FromString(record.body)))
        elif record.kind is Kind.WAIT:
            self._runner.release_held()
            self._plans.popleft().abandon()
        elif record.kind is Kind.MASK:
            for plan in self._plans:
                if plan.number == record.number:
                    plan.mask(plan_pb2.Masks.FromString(record.body))
        elif record.kind is Kind.RESUME:
            self._runner.resume(record.body)
        else:
            self._runner.reset(record.body)
