"""Node 0's end of the link: it says which nodes take part, passes on what each has noted, and loses silent ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog
import zmq

from runner_svc.group.board import ROW_BYTES, row_kind, row_ready
from runner_svc.group.node import Node
from runner_svc.nodes.keys import GroupKeys
from runner_svc.nodes.likeness import difference_of_facts, difference_of_kinds
from runner_svc.nodes.messages import (
    Again,
    BadMessage,
    End,
    Hello,
    Message,
    Record,
    Refusal,
    State,
    Welcome,
    packed,
    read,
)
from runner_svc.nodes.mirror import Mirror, News
from runner_svc.nodes.node_link import BEATS, LinkOptions, NodeLink
from runner_svc.nodes.ring_reader import MakeRing, RingReader

_CONTEST_S = 1.0
"""Seconds in which a node has to speak, to keep its number from another launcher that asks for it."""
_TOLD_STATUSES = (0, 1, 2)
"""Exit statuses with which the whole group ends; after another one this launcher is expected to come back."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Peer:
    """Another node that takes part."""

    number: int
    address: bytes
    name: str
    launcher: str
    silent_s: float = 0.0
    rivals: dict[str, float] = field(default_factory=dict)  # other launchers that ask for its number, and since when
    compared: tuple[str, ...] = ()
    news: News = field(default_factory=News)

    def __str__(self) -> str:
        return f"node {self.number} ({self.name})"


class Hub(NodeLink):
    """The link of node 0."""

    def __init__(
        self,
        mirror: Mirror,
        options: LinkOptions,
        ring: MakeRing,
        keys: GroupKeys | None,
    ) -> None:
        """Raises zmq.ZMQError if the endpoint can't be listened at."""
        super().__init__(mirror, options)
        self._open(zmq.ROUTER).setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            keys.protect_server(self._context, self._socket)
        try:
            self._socket.bind(options.endpoint)
        except zmq.ZMQError:
            self._socket.close()
            self._context.term()
            raise
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peers: dict[int, _Peer] = {}
        self._awake_s = 0.0  # the clock by which other nodes are silent
        self._reader = RingReader(mirror, ring, self._poke)

    def start(self) -> None:
        super().start()
        self._reader.start()

    def close(self, status: int, why: str = "") -> None:
        self._reader.close()
        super().close(status, why)

    def _turn(self, elapsed_s: float, beats: bool) -> None:
        records = self._reader.take()
        self._awake_s += elapsed_s
        self._receive()
        for peer in list(self._peers.values()):
            peer.silent_s += elapsed_s
            if peer.silent_s > self._options.timeout_s:
                self._lose(peer, f"was silent for {peer.silent_s:.1f} s")
            else:
                self._compare(peer)
        self._mirror.show()
        rows = self._rows()
        for peer in list(self._peers.values()):
            own = self._node.ranks_of(peer.number)
            others = {rank: row for rank, row in rows.items() if rank not in own}
            state = peer.news.of(self._mirror, others, beats)
            if state is not None:
                self._send(peer, state)
        self._pass_on(records)

    def _pass_on(self, records: list[Record]) -> None:
        """Sends what rank 0 has written to all nodes; one that has lost its connection is lost.

        What ranks had noted before rank 0 wrote it was sent before: a plan may reuse blocks of tickets that all have
        done.
        """
        for record in records:
            self._mirror.passed_on = (record.epoch, record.number)
            for peer in list(self._peers.values()):
                self._send(peer, record)

    def _rows(self) -> dict[int, bytes]:
        mirror = self._mirror
        gone = bytes(ROW_BYTES)
        return {**mirror.own_rows(), **{rank: mirror.heard(rank) or gone for rank in self._node.others}}

    @property
    def _node(self) -> Node:
        return self._mirror.node

    # ------------------------------------------------------------------ messages

    def _receive(self) -> None:
        while self._socket.poll(0):
            address, *frames = self._socket.recv_multipart()
            peer = next((peer for peer in self._peers.values() if peer.address == address), None)
            try:
                message = read(b"".join(frames))
            except BadMessage as error:
                log.warning("nodes: ignored a message", reason=str(error))
                continue
            if peer is not None:
                peer.silent_s = 0.0
            if isinstance(message, Hello):
                self._meet(address, message)
            elif peer is None:
                if isinstance(message, State):
                    self._send_to(address, Again())
            elif isinstance(message, State):
                wrong = self._mirror.hear(message, self._node.ranks_of(peer.number))
                if wrong:
                    log.warning("nodes: a node spoke of ranks that are not its own", node=peer.number, ranks=wrong)
            elif isinstance(message, End):
                self._lose(peer, f"has ended with status {message.status}{': ' if message.why else ''}{message.why}")

    def _meet(self, address: bytes, hello: Hello) -> None:
        number = hello.node
        if difference := difference_of_facts(hello.facts, self._options.facts):
            return self._refuse(address, hello, difference)
        if not 0 < number < self._node.count:
            return self._refuse(address, hello, f"node_rank is to be 1 to {self._node.count - 1} there")
        there = self._peers.get(number)
        if there is not None and there.address == address:
            return None  # it asked several times while this launcher was away
        if there is not None:
            if there.launcher != hello.launcher:
                return self._contest(there, address, hello)
            self._lose(there, "has connected again")
        peer = self._peers[number] = _Peer(number, address, hello.name, hello.launcher)
        log.info("a node takes part", node=number, name=hello.name)
        self._send(peer, Welcome())
        return None

    def _contest(self, peer: _Peer, address: bytes, hello: Hello) -> None:
        """Refuses another launcher that asks for a node's number, if the node has gone on speaking since it first did.

        If the node is gone instead, it is lost soon, and the other launcher, which asks again, takes its place.
        """
        limit_s = max(_CONTEST_S, 3 * self._options.timeout_s / BEATS)
        asked_at = peer.rivals.setdefault(hello.launcher, self._awake_s)
        if self._awake_s - asked_at > limit_s > peer.silent_s:
            del peer.rivals[hello.launcher]
            self._refuse(address, hello, f"{peer} takes part already: give each node its own node_rank")

    def _compare(self, peer: _Peer) -> None:
        """Refuses a node whose ranks have loaded something else than rank 0."""
        board = self._mirror.board
        if not board.ready(0):
            return
        rows = [row for rank in self._node.ranks_of(peer.number) if (row := self._mirror.heard(rank)) is not None]
        kinds = tuple(row_kind(row) for row in rows if row_ready(row))
        ours = row_kind(board.row(0))
        if peer.compared == (ours, *kinds):
            return
        peer.compared = (ours, *kinds)
        for kind in kinds:
            if difference := difference_of_kinds(kind, ours):
                self._send(peer, Refusal(f"{peer} can't take part: {difference}"))
                self._lose(peer, f"can't take part: {difference}")
                return

    def _refuse(self, address: bytes, hello: Hello, why: str) -> None:
        log.error("a node is refused", node=hello.node, name=hello.name, reason=why)
        self._send_to(address, Refusal(f"node {hello.node} ({hello.name}) can't take part: {why}"))

    def _lose(self, peer: _Peer, how: str) -> None:
        if self._peers.get(peer.number) is not peer:
            return
        del self._peers[peer.number]
        log.warning("a node is lost", node=peer.number, name=peer.name, reason=how)
        self._mirror.forget(self._node.ranks_of(peer.number), f"{peer} {how}")

    # ------------------------------------------------------------------ sending

    def _send(self, peer: _Peer, message: Message | Record) -> None:
        if not self._send_to(peer.address, message):
            self._lose(peer, "has lost its connection")

    def _send_to(self, address: bytes, message: Message) -> bool:
        """Returns whether the message was taken: the connection stands, and its queue is not full."""
        try:
            self._socket.send_multipart((address, packed(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _say_goodbye(self, end: End) -> None:
        self._pass_on(self._reader.take())
        if end.status in _TOLD_STATUSES:
            for peer in list(self._peers.values()):
                self._send(peer, end)
        self._socket.close()
