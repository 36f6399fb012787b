"""Ranks form a group over gloo, exchange, lose one and form again; here threads stand in for processes."""

from __future__ import annotations

import ast
import os
import random
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from runner_svc.group.board import Board
from runner_svc.group.forming import Group, store_between_hosts, store_in
from runner_svc.group.shared_page import attach, create
from runner_svc.interface.ranks import RankLost, Shard
from tests.support.import_graph import ROOT, modules
from tests.support.ranks import together
from tests.support.thoroughness import count

SIZES = (2, 3, 4)


def of_each(group: Group) -> dict[str, list[list[int]]]:
    rank = group.shard.rank
    whole = torch.full((2, 3), rank + 1)
    most = torch.full((1, 2), 2**63 - 1)  # sums of the hash backend wrap
    return {
        "reduced": group.all_reduce(whole).tolist(),
        "wrapped": group.all_reduce(most).tolist(),
        "gathered": group.all_gather(torch.full((2, 1), rank)).tolist(),
        "broadcast": group.broadcast(torch.tensor([[7 - rank]])).tolist(),
        "least": [[group.least(10 - rank)]],
    }


@pytest.mark.parametrize("size", SIZES)
def test_exchanges_give_every_rank_the_same(size: int, tmp_path: Path) -> None:
    def run(shard: Shard) -> dict[str, list[list[int]]]:
        group = Group(shard, store_in(tmp_path, size))
        group.form()
        return of_each(group)

    wrapped = (size * (2**63 - 1) + 2**63) % 2**64 - 2**63
    assert (
        together(size, run)
        == [
            {
                "reduced": [[size * (size + 1) // 2] * 3] * 2,
                "wrapped": [[wrapped] * 2],
                "gathered": [list(range(size))] * 2,
                "broadcast": [[7]],
                "least": [[11 - size]],
            }
        ]
        * size
    )


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_sees_that_one_gave_up_and_all_form_again(size: int, tmp_path: Path) -> None:
    def run(shard: Shard) -> dict[str, list[list[int]]]:
        group = Group(shard, store_in(tmp_path, size))
        for epoch in (1, 2, 3):
            group.form(epoch)
            of_each(group)
            if shard.rank == epoch % size:
                group.abort()
            else:
                with pytest.raises(RankLost, match="the connection to another rank broke"):
                    of_each(group)
            with pytest.raises(RankLost, match="the group was given up"):
                group.all_reduce(torch.ones(1))
        group.form(9)
        return of_each(group)

    first, *others = together(size, run)
    assert others == [first] * (size - 1)


def between_hosts(size: int, over: list[str]) -> list[Group]:
    """Returns the groups of ranks that are on hosts of their own, as far as they know. `over`: why they end, if so.

    An exchange that gloo does not end delays the end of a test by its timeout.
    """
    page = create()
    board = Board(attach(page), size)
    os.close(page)
    groups = []
    for rank in range(size):
        find_store, store = store_between_hosts("127.0.0.1", board, rank)
        board.describe(rank, "", store)
        shard = Shard(rank, size)
        groups.append(Group(shard, find_store, address="127.0.0.1", timeout_s=2, given_up=lambda: "".join(over)))
    return groups


def test_ranks_of_several_hosts_find_one_another_at_rank_0s_store() -> None:
    groups = between_hosts(3, [])

    for epoch in (1, 2):
        together(3, lambda shard: groups[shard.rank].form(epoch))  # noqa: B023
    first, *others = together(3, lambda shard: of_each(groups[shard.rank]))
    assert others == [first] * 2 and first["least"] == [[8]]
    kept = groups[0]._store.list_keys()  # type: ignore[union-attr]
    assert kept and all(key.startswith("roster-2/") for key in kept)


def test_an_exchange_with_a_host_that_is_gone_is_cut_short() -> None:
    """Rank 1 keeps its connections and says nothing, as if its host had lost its network."""
    over: list[str] = []
    groups = between_hosts(2, over)
    together(2, lambda shard: groups[shard.rank].form())
    assert groups[0].needs_abort
    ended = threading.Event()

    def wait_long() -> None:
        with pytest.raises(RankLost, match="node 1 was silent"):
            groups[0].all_reduce(torch.ones(3))
        ended.set()

    threading.Thread(target=wait_long, daemon=True).start()
    assert not ended.wait(0.1)
    over.append("node 1 was silent")
    groups[0].abort()
    assert ended.wait(10), "the exchange went on"
    over.clear()
    together(2, lambda shard: groups[shard.rank].form(2))


class Stuck:
    """An exchange that gloo goes on waiting for, although its connection was cut."""

    completed = False

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.completed


def test_an_exchange_that_gloo_does_not_end_is_left_and_kept_until_it_has() -> None:
    """The end of a group whose exchange goes on would wait for it, with the interpreter's lock."""
    over: list[str] = []
    groups = between_hosts(2, over)
    together(2, lambda shard: groups[shard.rank].form())
    over.append("node 1 was silent")
    stuck = Stuck()
    method = groups[0]._method
    groups[0]._method = lambda name: lambda *arguments: stuck  # type: ignore[method-assign]
    with pytest.raises(RankLost, match="node 1 was silent"):
        groups[0].all_reduce(torch.ones(1))
    groups[0]._method = method  # type: ignore[method-assign]
    over.clear()
    for epoch in (2, 3, 4):
        together(2, lambda shard: groups[shard.rank].form(epoch))  # noqa: B023
        assert [work for _, work in groups[0]._unfinished] == ([stuck] if epoch < 4 else [])
        stuck.completed = epoch == 3


def test_exchanges_between_hosts_end_with_their_group_at_any_moment() -> None:
    over: list[str] = []
    groups = between_hosts(2, over)
    rng = random.Random(26)

    def end(group: Group) -> None:
        over.append("it is over")
        group.abort()

    def run(shard: Shard, epoch: int) -> None:
        group = groups[shard.rank]
        group.form(epoch)
        if shard.rank == epoch % 2:
            threading.Timer(rng.uniform(0, 0.003), end, (group,)).start()
        with pytest.raises(RankLost):
            while True:
                group.all_reduce(torch.from_numpy(np.arange(5000)))

    for epoch in range(1, count(300, in_ci=8)):
        began_at = time.monotonic()
        together(2, lambda shard: run(shard, epoch))  # noqa: B023
        assert time.monotonic() - began_at < 20, "an exchange went on"
        over.clear()


def test_an_error_that_is_kept_keeps_no_connection(tmp_path: Path) -> None:
    """A plan keeps the fault of its draw, for example: the ranks that wait for this one would not see it leave."""
    kept, made, left = list[BaseException](), list[weakref.ref[object]](), threading.Event()

    def run(shard: Shard) -> None:
        group = Group(shard, store_in(tmp_path, 3), timeout_s=20)
        group.form()
        group.barrier()
        if shard.rank == 0:
            group.abort()
            left.set()
            return
        made.append(weakref.ref(group._processes))
        left.wait()
        try:
            of_each(group)
        except RankLost as error:
            kept.append(error)

    together(3, run)
    assert len(kept) == 2 and all(error.__traceback__ is not None for error in kept)
    assert [connection() for connection in made] == [None, None]


def test_a_rank_that_does_not_come_is_missed(tmp_path: Path) -> None:
    group = Group(Shard(0, 2), store_in(tmp_path, 2), forming_s=0.3, given_up=lambda: "rank 1 has ended")
    with pytest.raises(RankLost, match="rank 1 has ended"):
        group.form()


def test_nothing_is_exchanged_before_the_group_has_formed(tmp_path: Path) -> None:
    group = Group(Shard(1, 3), store_in(tmp_path, 3))
    assert of_each(group) == {
        "reduced": [[2] * 3] * 2,
        "wrapped": [[2**63 - 1] * 2],
        "gathered": [[1] * 3] * 2,
        "broadcast": [[6]],
        "least": [[9]],
    }


def test_nothing_calls_a_collective_that_pickles() -> None:
    """Torch's collectives of objects pickle, so that a rank could be made to execute what another sends."""
    calls = [
        f"{path.relative_to(ROOT)}: {node.attr}"
        for path in modules("runner_svc").values()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and (node.attr.endswith("_object") or "_object_" in node.attr)
    ]
    assert [call for call in calls if "send" in call or "gather" in call or "cast" in call or "scatter" in call] == []
