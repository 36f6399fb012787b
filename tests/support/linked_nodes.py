"""Nodes of one group in this process: a board and a ring each, and real links between them over loopback.

    with LinkedNodes(size=4, nodes=2) as linked:
        linked.gather()

Nothing else is shared: a rank's member sees its own node's memory only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from runner_svc.group.board import Board
from runner_svc.group.member import Member
from runner_svc.group.node import Node
from runner_svc.group.shared_page import attach, create
from runner_svc.interface.ranks import Shard
from runner_svc.nodes.hub import Hub
from runner_svc.nodes.keys import GroupKeys
from runner_svc.nodes.node_link import LinkOptions, NodeLink
from runner_svc.nodes.opening import link_of
from runner_svc.nodes.spoke import Spoke

PATIENCE_S = 20.0
FACTS = {"version": "roster 1", "block_size": "16"}


@dataclass
class OneNode:
    """What one host has."""

    link: NodeLink
    board: Board
    members: list[Member]


class LinkedNodes:
    """All nodes of a group, whose links talk as long as the context is open."""

    def __init__(
        self,
        size: int,
        nodes: int,
        timeout_s: float = 10.0,
        spoke: type[Spoke] = Spoke,
        keys: Callable[[int], GroupKeys | None] = lambda number: None,
        facts: Callable[[int], Mapping[str, str]] = lambda number: FACTS,
    ) -> None:
        """`keys`, `facts`: those of each node. `spoke`: kind of link of nodes other than 0."""
        self.size, self.count, self.timeout_s = size, nodes, timeout_s
        self._spoke, self._keys, self._facts = spoke, keys, facts
        self.endpoint = "tcp://127.0.0.1:*"
        self.nodes: dict[int, OneNode] = {}
        for number in range(nodes):
            self.open(number)

    def open(self, number: int) -> OneNode:
        """Starts a node with an empty board."""
        page, node = create(), Node(self.size, number, self.count)
        memory = attach(page)
        options = LinkOptions(self.endpoint, self._facts(number), self.timeout_s)
        link = link_of(memory, node, options, self._keys(number), self._spoke)
        if isinstance(link, Hub):
            self.endpoint = link.endpoint
        members = [Member(Shard(rank, self.size), page, num_processors=1, node=node) for rank in node.ranks]
        os.close(page)
        self.nodes[number] = OneNode(link, Board(memory, self.size), members)
        link.start()
        return self.nodes[number]

    def close(self, number: int, status: int = 3) -> None:
        """Ends a node's launcher. The others expect it back, unless its status says otherwise."""
        self.nodes.pop(number).link.close(status)

    @property
    def members(self) -> list[Member]:
        """The members of all nodes, by rank."""
        return [member for number in sorted(self.nodes) for member in self.nodes[number].members]

    def gather(self) -> int:
        """Has all ranks come for an epoch; returns its number."""
        threads = [threading.Thread(target=member.gather, daemon=True) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        epochs = {member.epoch for member in self.members}
        assert len(epochs) == 1 and not any(thread.is_alive() for thread in threads), epochs
        return epochs.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in sorted(self.nodes, reverse=True):
            self.close(number)


def eventually(come_true: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + within_s
    while not come_true():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.005)
