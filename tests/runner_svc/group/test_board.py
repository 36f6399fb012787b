"""What ranks and launcher tell one another: an epoch begins when all have come, and ends once, with its reason."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest

from runner_svc.group import board
from runner_svc.group.board import DIGESTS_KEPT, Board
from runner_svc.group.member import VARIABLE, Member, Place
from runner_svc.group.shared_page import MOST_RANKS, attach, create
from runner_svc.interface.ranks import Shard
from runner_svc.tiers.kv_copier import Direction

SIZE = 3


@pytest.fixture
def members() -> list[Member]:
    page = create()
    made = [Member(Shard(rank, SIZE), page) for rank in range(SIZE)]
    os.close(page)
    return made


def gathered(members: list[Member], delay_s: float = 0.0) -> list[int]:
    epochs: list[int] = []

    def gather(member: Member) -> None:
        time.sleep(delay_s * member.shard.rank)
        epochs.append(member.gather())

    threads = [threading.Thread(target=gather, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return epochs


def test_all_gather_for_one_epoch_after_the_other(members: list[Member]) -> None:
    for epoch in (1, 2, 3):
        assert gathered(members, delay_s=0.02) == [epoch] * SIZE
        assert not any(member.lost for member in members)
        members[epoch % SIZE].give_up(f"the {epoch}th")
        members[0].give_up("too late to count")
        assert [member.lost for member in members] == [f"the {epoch}th"] * SIZE


def test_an_epoch_that_ends_while_ranks_gather_is_left(members: list[Member]) -> None:
    early = threading.Thread(target=gathered, args=(members[:2],))
    early.start()
    board = members[2].board
    board.wait(lambda: board.ready(0) == board.ready(1) == 1)
    board.give_up(1, "rank 2 ended while it loaded")
    board.wait(lambda: board.ready(0) == board.ready(1) == 2)
    assert members[2].gather() == 2
    early.join()


def test_the_launchers_reason_counts_before_a_guess(members: list[Member]) -> None:
    gathered(members)
    threading.Timer(0.02, members[0].board.give_up, [1, "rank 1 (pid 7) was ended by signal 9"]).start()
    assert members[2].learn_why("the connection broke") == "rank 1 (pid 7) was ended by signal 9"


def test_a_guess_counts_if_nobody_knows_better(members: list[Member]) -> None:
    gathered(members)
    assert members[2].learn_why("the connection broke") == "the connection broke"
    assert members[0].lost == "the connection broke"


def test_who_comes_too_late_takes_no_epoch_back(members: list[Member], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 is paused between its look at the epoch and its word."""
    late, told = members[2].board, board._write

    def paused(*arguments: Any) -> None:
        monkeypatch.setattr(board, "_write", told)
        for epoch in (1, 2, 3):
            members[0].board.give_up(epoch, f"the {epoch}th")
        told(*arguments)

    monkeypatch.setattr(board, "_write", paused)
    late.give_up(1, "rank 2's reason")
    assert late.given_up == 3 and [late.why_given_up(epoch) for epoch in (3, 4)] == ["the 3th", ""]


def test_of_two_reasons_at_once_each_is_whole_and_the_launchers_counts(
    members: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = create()
    memory = attach(page)
    os.close(page)
    launcher, rank = Board(memory, SIZE), Board(memory, SIZE, board.of_rank(1))
    told = board._write

    def first(*arguments: Any) -> None:
        monkeypatch.setattr(board, "_write", told)
        launcher.give_up(1, "rank 0 was ended by signal 9")
        told(*arguments)

    monkeypatch.setattr(board, "_write", first)
    rank.give_up(1, "x" * 200)
    assert rank.why_given_up(1) == launcher.why_given_up(1) == "rank 0 was ended by signal 9"
    rank.start(1)  # a new process: what the former one gave up stays so
    assert rank.given_up == 1


def test_long_texts_are_cut_and_a_new_process_has_none(members: list[Member]) -> None:
    board: Board = members[0].board
    board.explain(1, "ä" * 1000)
    assert board.explanation(1) == "ä" * 250
    board.come(1, 4)
    board.start(1)
    assert board.explanation(1) == "" and board.ready(1) == 0


def test_digests_are_those_of_the_last_plans(members: list[Member]) -> None:
    board, rng = members[0].board, random.Random(1)
    kept = {}
    for number in range(1, 3 * DIGESTS_KEPT):
        kept[number] = rng.randrange(1 << 32)
        board.keep_digest(2, number, kept[number])
        for asked in range(1, number + 3):
            there = number - DIGESTS_KEPT < asked <= number
            assert board.digest(2, asked) == (kept[asked] if there else None)


def test_tickets_are_done_when_all_have_done_them(members: list[Member]) -> None:
    gathered(members)
    board = members[1].board
    for rank, done in enumerate((5, 3, 4)):
        board.count_tickets(rank, Direction.LOAD, done)
    assert board.tickets_of_all(Direction.LOAD) == 3 and board.tickets_of_all(Direction.OFFLOAD) == 0
    members[1].give_up("over")
    gathered(members)
    assert board.tickets_of_all(Direction.LOAD) == 0


def test_the_most_ranks_have_room() -> None:
    page = create()
    Board(attach(page), MOST_RANKS)
    with pytest.raises(ValueError, match="no room"):
        Board(attach(page), 4 * MOST_RANKS)
    os.close(page)


def test_a_process_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(2, 3, 77, 5, "/dev/shm/x")
    monkeypatch.setenv(VARIABLE, place.text())
    assert Place.of_environment() == place
    monkeypatch.delenv(VARIABLE)
    assert Place.of_environment() is None
