"""Launchers of several nodes: all ranks come for one epoch, plans reach each in order, and what is lost is named."""

from __future__ import annotations

import random
import threading

import pytest
import zmq

from runner_svc.group.member import Member
from runner_svc.group.shared_page import RING_BYTES
from runner_svc.interface.ranks import RankLost
from runner_svc.nodes.keys import GroupKeys
from runner_svc.nodes.likeness import difference_of_facts, difference_of_kinds, facts
from runner_svc.nodes.messages import Message, Record
from runner_svc.nodes.spoke import Spoke
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.tiers.kv_copier import Direction
from tests.support.linked_nodes import FACTS, LinkedNodes, eventually


def read_all(member: Member, count: int, into: list[bytes | str]) -> threading.Thread:
    def run() -> None:
        try:
            for _ in range(count):
                into.append(member.ring.read())
        except RankLost as error:
            into.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("size", "nodes"), [(2, 2), (4, 2), (6, 3)])
def test_all_ranks_come_for_one_epoch_and_have_every_record(size: int, nodes: int) -> None:
    rng = random.Random(size)
    with LinkedNodes(size, nodes) as linked:
        for epoch in (1, 2, 3):
            assert linked.gather() == epoch
            lengths = [rng.randrange(200) for _ in range(40)] + [RING_BYTES + 5 if epoch == 2 else 7]
            sent = [rng.randbytes(length) for length in lengths]
            had: list[list[bytes | str]] = [[] for _ in range(size)]
            readers = [read_all(member, len(sent), had[member.shard.rank]) for member in linked.members[1:]]
            for record in sent:
                linked.members[0].ring.write(record)
            for reader in readers:
                reader.join(20)
            assert had[1:] == [sent] * (size - 1)
            linked.members[epoch % size].give_up(f"the {epoch}th")
            eventually(lambda: all(member.lost for member in linked.members))
            assert {member.lost for member in linked.members} == {f"the {epoch}th"}


def test_what_ranks_note_reaches_every_node() -> None:
    with LinkedNodes(4, 2) as linked:
        linked.gather()
        boards = [node.board for node in linked.nodes.values()]
        for rank, member in enumerate(linked.members):
            member.board.keep_digest(rank, 7, 100 + rank)
            member.board.count_tickets(rank, Direction.LOAD, 3 + rank)
        for rank in (3, 2, 1, 0):
            linked.members[rank].board.describe(rank, "", "" if rank else "10.0.0.7:4711")
        for board in boards:
            eventually(lambda board=board: [board.digest(rank, 7) for rank in range(4)] == [100, 101, 102, 103])  # type: ignore[misc]
            eventually(lambda board=board: board.tickets_of_all(Direction.LOAD) == 3)  # type: ignore[misc]
            eventually(lambda board=board: board.store() == "10.0.0.7:4711")  # type: ignore[misc]


def test_what_was_noted_before_a_record_is_known_with_it() -> None:
    """Rank 0 writes plans that reuse blocks of a ticket as soon as it sees it done by all."""
    with LinkedNodes(2, 2) as linked:
        linked.gather()
        first, second = linked.members
        for number in range(1, 40):
            second.board.count_tickets(1, Direction.OFFLOAD, number)
            eventually(lambda: first.board._ranks["offloads"][1] == number)  # noqa: B023
            first.board.count_tickets(0, Direction.OFFLOAD, number)
            first.ring.write(b"a plan")
            assert second.ring.read() == b"a plan"
            assert second.board.tickets_of_all(Direction.OFFLOAD) == number


class Drops(Spoke):
    """Loses the third record."""

    def _handle(self, message: Message) -> None:
        if not (isinstance(message, Record) and message.number == 3):
            super()._handle(message)


class Swaps(Spoke):
    """Hands on the third record after the fourth."""

    held: Message | None = None

    def _handle(self, message: Message) -> None:
        if isinstance(message, Record) and message.number == 3:
            self.held = message
            return
        super()._handle(message)
        if self.held is not None and isinstance(message, Record):
            super()._handle(self.held)


@pytest.mark.parametrize("kind", [Drops, Swaps])
def test_a_record_that_is_lost_or_overtaken_ends_the_epoch(kind: type[Spoke]) -> None:
    with LinkedNodes(2, 2, spoke=kind) as linked:
        linked.gather()
        had: list[bytes | str] = []
        reader = read_all(linked.members[1], 5, had)
        for number in range(5):
            linked.members[0].ring.write(b"%d" % number)
        reader.join(20)
        assert had[:2] == [b"0", b"1"] and len(had) == 3
        eventually(lambda: linked.members[0].lost)
        assert linked.members[0].lost == had[2] == "node 1 missed what rank 0 passed on: record 3, when 4 was sent"
        assert linked.gather() == 2


def test_a_last_record_that_is_lost_is_noticed_too() -> None:
    with LinkedNodes(2, 2, spoke=Drops) as linked:
        linked.gather()
        for number in range(3):
            linked.members[0].ring.write(b"%d" % number)
        eventually(lambda: linked.members[0].lost)
        assert linked.members[1].lost == "node 1 missed what rank 0 passed on: record 3, when 3 was sent"


def test_records_of_an_epoch_that_is_over_reach_no_ring() -> None:
    with LinkedNodes(2, 2) as linked:
        linked.gather()
        linked.members[0].ring.write(b"of the first")
        linked.members[1].give_up("over")
        eventually(lambda: linked.members[0].lost)
        assert linked.gather() == 2
        had: list[bytes | str] = []
        reader = read_all(linked.members[1], 1, had)
        linked.members[0].ring.write(b"of the second")
        reader.join(20)
        assert had == [b"of the second"]


def test_a_node_that_ends_is_named_and_one_in_its_place_joins_again() -> None:
    with LinkedNodes(4, 2) as linked:
        linked.gather()
        linked.close(1)
        eventually(lambda: linked.members[0].lost)
        assert "node 1" in linked.members[0].lost and "has ended with status 3" in linked.members[0].lost
        linked.open(1)
        assert linked.gather() == 2


def test_node_0_that_starts_again_learns_the_epoch_of_the_others() -> None:
    with LinkedNodes(3, 3) as linked:
        for _ in range(3):
            last = linked.gather()
            linked.members[2].give_up("again")
            eventually(lambda: all(member.lost for member in linked.members))
        assert last == 3 and linked.gather() == 4
        linked.close(0)
        linked.open(0)
        eventually(lambda: all(member.lost for member in linked.members[1:]))
        assert linked.gather() == 5


def test_a_rank_that_lags_behind_by_more_than_the_ring_does_not_silence_its_node() -> None:
    with LinkedNodes(2, 2) as linked:
        linked.gather()
        sent = [bytes([number]) * (RING_BYTES // 2 + number) for number in range(5)]
        for record in sent:
            linked.members[0].ring.write(record)
        eventually(lambda: linked.nodes[1].link._next == 6)  # type: ignore[attr-defined]
        linked.members[1].board.explain(1, "a long step")
        eventually(lambda: linked.nodes[0].board.explanation(1) == "a long step")
        had: list[bytes | str] = []
        read_all(linked.members[1], len(sent), had).join(20)
        assert had == sent


class Silent(Spoke):
    """Says nothing while `quiet`, as if its host had lost its network."""

    quiet = False

    def _turn(self, elapsed_s: float, beats: bool) -> None:
        if not self.quiet:
            super()._turn(elapsed_s, beats)


def test_a_silent_node_is_lost_and_takes_part_again() -> None:
    with LinkedNodes(2, 2, timeout_s=0.6, spoke=Silent) as linked:
        linked.gather()
        spoke = linked.nodes[1].link
        assert isinstance(spoke, Silent)
        spoke.quiet = True
        eventually(lambda: linked.members[0].lost)
        assert "was silent for 0.6 s" in linked.members[0].lost
        assert not linked.members[1].lost, "it does not know yet"
        spoke.quiet = False
        eventually(lambda: linked.members[1].lost)
        assert linked.gather() >= 2


def test_nodes_with_other_settings_or_releases_are_refused_by_name() -> None:
    other = {**FACTS, "block_size": "32"}
    with LinkedNodes(2, 2, facts=lambda number: other if number else FACTS) as linked:
        spoke = linked.nodes[1].link
        eventually(lambda: spoke.verdict)
        assert spoke.verdict is not None and spoke.verdict.status == 2
        assert spoke.verdict.why.startswith("node 1 (")
        told = "its block_size is 32, but that of node 0 is 16: set block_size to the same value on all nodes"
        assert spoke.verdict.why.endswith(f"can't take part: {told}")


def test_ranks_that_have_loaded_something_else_are_refused_by_name() -> None:
    with LinkedNodes(2, 2) as linked:
        for rank, weights in ((0, "abc"), (1, "def")):
            linked.members[rank].board.describe(rank, f'{{"weights": "{weights}"}}')
        for member in linked.members:
            threading.Thread(target=member.gather, daemon=True).start()
        spoke = linked.nodes[1].link
        eventually(lambda: spoke.verdict)
        assert spoke.verdict is not None
        assert "its weights is def, but that of node 0 is abc: give all nodes the same files" in spoke.verdict.why
        assert not linked.nodes[0].board.is_complete


def pair() -> GroupKeys:
    public, secret = zmq.curve_keypair()
    return GroupKeys(secret, public)


def test_launchers_with_the_key_of_the_runner_talk_and_others_do_not() -> None:
    own, other = pair(), pair()
    with LinkedNodes(2, 2, keys=lambda number: own) as linked:
        assert linked.gather() == 1
    for theirs in (other, None):
        with LinkedNodes(2, 2, keys=lambda number: theirs if number else own) as linked:  # noqa: B023
            threading.Event().wait(0.4)
            assert not linked.nodes[1].link._is_welcome  # type: ignore[attr-defined]


def test_what_is_no_message_or_not_its_to_say_changes_nothing() -> None:
    with LinkedNodes(4, 2) as linked:
        linked.gather()
        linked.members[3].board.explain(3, "why rank 3 has ended")
        row = linked.nodes[1].board.row(3)
        spoke = linked.nodes[1].link
        assert isinstance(spoke, Spoke)
        spoke._mirror.own_rows = lambda: {3: row, 1: row}  # type: ignore[method-assign]
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(linked.endpoint)
            for data in (b"", b"?", b"Hno json", b"S", b"R", b"X\xff", b"H" + b"[" * 100_000):
                stranger.send(data)
        eventually(lambda: linked.nodes[0].board.explanation(3))
        assert linked.nodes[0].board.ready(1) == 1 and not any(member.lost for member in linked.members)
        assert linked.nodes[0].board.row(1) != row


def test_facts_name_every_setting_that_must_be_equal() -> None:
    base = {"device": "hash", "tensor_parallel": 2, "nnodes": 2, "rdzv_endpoint": "127.0.0.1:29500"}
    ours = facts(RunnerSettings.model_validate(base))
    own = {"node_rank": 1, "cache_dir": "/elsewhere", "model": "/other/path", "health_listen": "127.0.0.1:1"}
    assert difference_of_facts(facts(RunnerSettings.model_validate({**base, **own})), ours) == ""
    for name, value in (("block_size", 32), ("host_kv_tokens", 64), ("deterministic", True), ("threads", 63)):
        theirs = facts(RunnerSettings.model_validate({**base, name: value}))
        assert difference_of_facts(theirs, ours).startswith(f"its {name} is {str(value).lower()}, but that of node 0")
    assert "install the same release" in difference_of_facts({**ours, "version": "roster 9"}, ours)


def test_kinds_that_are_cut_off_are_compared_too() -> None:
    assert difference_of_kinds("no json", "no json") == ""
    assert "weights" in difference_of_kinds('{"weights": "a', '{"weights": "b')
