"""Several ranks are one runner: the engine's streams are exact, and a rank that skips a plan changes tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.hash_tokens import TokenPicker
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from runner_svc.group.follower import Follower
from runner_svc.group.member import Member
from runner_svc.group.rank_runner import RankRunner
from runner_svc.group.records import Kind, Record
from tests.scheduler_svc.engine.test_engine_exact import assert_random_streams_are_exact, backend, stack_of
from tests.support.plans import SAMPLE, admission, ints, plan
from tests.support.rank_group import MakeFollower, RankGroup
from tests.support.stepped_copier import SteppedCopier
from tests.support.thoroughness import count

NUM_REQUESTS = count(60, in_ci=10)


def serve(
    size: int,
    rng: random.Random,
    num_requests: int = NUM_REQUESTS,
    make_follower: MakeFollower = Follower,
    host_blocks: int = 0,
    members: list[Member] | None = None,
) -> None:
    """Serves random requests over ranks, and checks every stream. `members`: of the ranks; default: on one host."""
    stack = stack_of(rng, depth=rng.randint(1, 3))
    copiers = rng.randrange(1 << 30)

    def make_copier(one: HashBackend, rank: int) -> SteppedCopier:
        return SteppedCopier(one.cache_regions, host_blocks, random.Random(copiers + rank), 0.1)

    block_size = rng.choice((1, 8, 16))
    num_blocks = max(4, 96 // block_size)
    whole = backend(rng, block_size, num_blocks)
    group = RankGroup.spread(whole, size, make_copier if host_blocks else None, make_follower, members)
    stack.connect(group.runner)
    assert_random_streams_are_exact(stack, rng, num_blocks * block_size, num_requests)
    assert not group.runner.lost


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("host_blocks", [0, 24])
@pytest.mark.parametrize("number", range(count(20, in_ci=1)))
def test_streams_equal_their_solo_output(size: int, host_blocks: int, number: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    serve(size, random.Random(seed), host_blocks=host_blocks)


SIZES: dict[str, Any] = {
    "num_slots": 2,
    "block_size": 4,
    "num_blocks": 12,
    "context_length": 64,
    "eos_probability": 0.0,
}


def generated(runner: Runner) -> list[int]:
    """Returns the tokens of one sequence, whose prompt takes two plans."""
    runner.reset()
    prompt = [5, 6, 7, 8, 9, 10]
    runner.execute(1, plan(admissions=[admission(0, prompt, [1, 2, 3])], extents=[(0, 0, 4, 0)]))
    tokens = ints(runner.execute(2, plan(extents=[(0, 4, 2, SAMPLE)])).tokens)
    for number in range(3, 8):
        tokens += ints(runner.execute(number, plan(extents=[(0, 3 + number, 1, SAMPLE)])).tokens)
    return tokens


class Skips(Follower):
    """Counts a plan as done, and takes part in its exchanges, without keeping its KV."""

    def _do(self, record: Record) -> None:
        cache = self._runner._backend._kv  # type: ignore[attr-defined]
        kept = cache.copy()
        super()._do(record)
        if record.kind is Kind.LAUNCH and self._skips(record):
            cache[:] = kept

    def _skips(self, record: Record) -> bool:
        return record.number == 1


class SkipsLater(Skips):
    """Skips one plan in seven."""

    def _skips(self, record: Record) -> bool:
        return record.number % 7 == 5


class Drops(Follower):
    """Misses a plan."""

    def _do(self, record: Record) -> None:
        if record.number != 1:
            super()._do(record)


class Repeats(Follower):
    """Takes a plan twice."""

    def _do(self, record: Record) -> None:
        super()._do(record)
        if record.kind is Kind.LAUNCH and record.number == 1:
            super()._do(record)


class Swaps(Follower):
    """Takes the second plan first."""

    def __init__(self, member: Member, runner: RankRunner) -> None:
        super().__init__(member, runner)
        self._held: list[Record] = []

    def _do(self, record: Record) -> None:
        if record.number == 1:
            self._held.append(record)
            return
        super()._do(record)
        while self._held:
            super()._do(self._held.pop(0))


def test_ranks_compute_what_one_computes() -> None:
    assert generated(RankGroup.spread(HashBackend(**SIZES), 3).runner) == generated(Runner(HashBackend(**SIZES)))


def test_a_rank_that_skips_a_plan_changes_tokens() -> None:
    group = RankGroup.spread(HashBackend(**SIZES), 3, make_follower=Skips)
    assert generated(group.runner) != generated(Runner(HashBackend(**SIZES)))


@pytest.mark.parametrize("kind", [Drops, Repeats, Swaps])
def test_a_rank_that_misses_repeats_or_reorders_a_plan_is_named(kind: type[Follower]) -> None:
    def make(member: Member, runner: RankRunner) -> Follower:
        return kind(member, runner) if member.shard.rank == 1 else Follower(member, runner)

    with pytest.raises(PlanFault, match=r"rank 1 refused a plan: plan [12] can't follow plan [01]"):
        generated(RankGroup.spread(HashBackend(**SIZES), 3, make_follower=make).runner)


def test_the_suite_sees_a_rank_that_skips_plans() -> None:
    with pytest.raises(AssertionError):
        serve(2, random.Random(7), make_follower=SkipsLater)


def test_ranks_that_draw_other_tokens_are_named() -> None:
    group = RankGroup.spread(HashBackend(**SIZES), 3)
    group.backends[2]._picker = TokenPicker(300, 0.0)
    with pytest.raises(PlanFault, match="rank 2 and rank 0 have computed different tokens"):
        generated(group.runner)
