"""The runner of one rank: rank 0 passes the others each call that changes its state; all compare what they computed.

A rank whose backend fails gives the epoch up, and so does one whose slots refuse a plan, as another may not have: the
others would wait for it in their next exchange.
"""

from __future__ import annotations

import zlib
from typing import Any

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.plans_in_flight import LaunchedPlan
from runner_svc.execution.runner import Runner, told
from runner_svc.group.member import Member
from runner_svc.group.records import Kind, Record
from runner_svc.interface.backend import Backend
from runner_svc.interface.ranks import RankLost


class RankRunner(Runner):
    """A `Runner` whose group ends with any error of its backend. It is used for one epoch."""

    def __init__(self, member: Member, backend: Backend, *args: Any, **named: Any) -> None:
        """`args` and `named`: further arguments of `Runner`."""
        super().__init__(backend, *args, **named)
        self._member = member
        self._rank = member.shard.rank
        self._num_ended = 0  # plans in this epoch, of all sessions

    @property
    def lost(self) -> str:
        return self._member.lost

    def launch(self, number: int, plan: plan_pb2.Plan) -> LaunchedPlan:
        if self.lost:
            raise PlanFault(self.lost)
        if self._tier is not None and self._rank:
            with self._faulting(number):
                self._tier.has_news()  # rank 0 may have named tickets that all have done since the last look
        launched = super().launch(number, plan)
        launched.witness = self
        return launched

    def before_masks(self, number: int, masks: plan_pb2.Masks) -> None:
        """As `PlanWitness.before_masks`."""

    def before_wait(self, number: int) -> None:
        """As `PlanWitness.before_wait`."""

    def after_wait(self, number: int, result: plan_pb2.Result) -> None:
        """As `PlanWitness.after_wait`: keeps a digest of the result on the board."""
        self._num_ended = self._num_ended + 1 & 0xFFFFFFFF
        drawn = result.tokens + result.token_counts + result.statuses + result.drafted
        self._member.board.keep_digest(self._rank, self._num_ended, zlib.crc32(drawn, number))

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        if isinstance(error, RankLost):
            self._member.learn_why(str(error))
        else:
            why = f"refused a plan: {error}" if isinstance(error, PlanFault) else f"failed: {told(error)}"
            self._member.give_up(f"rank {self._rank} {why}")


class LeadingRunner(RankRunner):
    """Rank 0's runner. Its results count if every rank has computed the same."""

    def __init__(self, member: Member, backend: Backend, *args: Any, **named: Any) -> None:
        super().__init__(member, backend, *args, **named)
        self._num_compared = [0] * member.shard.size

    def hello(self) -> plan_pb2.Hello:
        hello = super().hello()
        member = self._member
        hello.ranks, hello.epoch = member.shard.size, member.epoch
        hello.lost_rank = member.board.why_given_up(member.epoch - 1) if member.epoch > 1 else ""
        return hello

    def reset(self, naming_secret: bytes = b"") -> None:
        self._tell(Record(Kind.RESET, body=naming_secret))
        super().reset(naming_secret)

    def resume(self, naming_secret: bytes = b"") -> None:
        self._tell(Record(Kind.RESUME, body=naming_secret))
        super().resume(naming_secret)

    def launch(self, number: int, plan: plan_pb2.Plan) -> LaunchedPlan:
        self._tell(Record(Kind.LAUNCH, number, plan.SerializeToString()))
        return super().launch(number, plan)

    def before_masks(self, number: int, masks: plan_pb2.Masks) -> None:
        self._tell(Record(Kind.MASK, number, masks.SerializeToString()))

    def before_wait(self, number: int) -> None:
        self._tell(Record(Kind.WAIT, number), wake=False)

    def after_wait(self, number: int, result: plan_pb2.Result) -> None:
        super().after_wait(number, result)
        board = self._member.board
        for rank in range(1, board.size):
            while (place := self._num_compared[rank]) < self._num_ended:
                theirs, ours = board.digest(rank, place + 1), board.digest(0, place + 1)
                if theirs is None and ours is not None:
                    break  # the rank lags behind
                self._num_compared[rank] += 1
                if theirs is not None and ours is not None and theirs != ours:
                    fault = PlanFault(f"rank {rank} and rank 0 have computed different tokens")
                    self._member.give_up(str(fault))
                    self._fail(fault)
                    raise fault

    def stop(self) -> None:
        """Has the other ranks end, after all plans."""
        self._tell(Record(Kind.STOP))

    def _tell(self, record: Record, wake: bool = True) -> None:
        try:
            self._member.ring.write(record.packed(), wake)
        except RankLost as error:
            self._fail(error)
            raise PlanFault(self.lost) from error
