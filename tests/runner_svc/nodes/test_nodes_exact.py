"""Ranks on several nodes are one runner: the engine's streams are exact, and a plan lost on the way is noticed."""

from __future__ import annotations

import random

import pytest

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.execution.runner import Runner
from runner_svc.group.records import Kind
from runner_svc.group.records import Record as Call
from runner_svc.nodes.messages import Message, Record
from runner_svc.nodes.spoke import Spoke
from tests.runner_svc.group.test_rank_group import SIZES, Skips, generated, serve
from tests.support.linked_nodes import LinkedNodes
from tests.support.rank_group import RankGroup
from tests.support.thoroughness import choice, count

NUM_REQUESTS = count(60, in_ci=6)


@pytest.mark.parametrize(("size", "nodes"), choice([(2, 2), (4, 2), (3, 3), (6, 2)], in_ci=[(4, 2)]))
@pytest.mark.parametrize("number", range(count(10, in_ci=1)))
def test_streams_equal_their_solo_output(size: int, nodes: int, number: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    host_blocks = rng.choice((0, 24))
    with LinkedNodes(size, nodes, timeout_s=30.0) as linked:
        serve(size, rng, NUM_REQUESTS, host_blocks=host_blocks, members=linked.members)


class Loses(Spoke):
    """Loses the record that launches plan 4."""

    def _handle(self, message: Message) -> None:
        if isinstance(message, Record):
            call = Call.read(message.body)
            if call.kind is Kind.LAUNCH and call.number == 4:
                return
        super()._handle(message)


def test_a_plan_that_a_node_does_not_get_ends_the_epoch_by_name() -> None:
    with LinkedNodes(4, 2, spoke=Loses) as linked:
        group = RankGroup.spread(HashBackend(**SIZES), 4, members=linked.members)
        with pytest.raises(PlanFault):
            generated(group.runner)
        assert linked.members[0].lost.startswith("node 1 missed what rank 0 passed on")


def test_ranks_of_two_nodes_compute_what_one_computes_unless_one_skips_a_plan() -> None:
    with LinkedNodes(4, 2) as linked:
        group = RankGroup.spread(HashBackend(**SIZES), 4, members=linked.members)
        assert generated(group.runner) == generated(Runner(HashBackend(**SIZES)))
    with LinkedNodes(4, 2) as linked:
        group = RankGroup.spread(HashBackend(**SIZES), 4, make_follower=Skips, members=linked.members)
        assert generated(group.runner) != generated(Runner(HashBackend(**SIZES)))
