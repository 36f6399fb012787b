"""The end of the link of a node other than 0: it asks to take part, and writes what rank 0 passes on to its ring."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import deque
from contextlib import suppress

import structlog
import zmq

from runner_svc.group.plan_ring import framed
from runner_svc.nodes.keys import GroupKeys
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
from runner_svc.nodes.node_link import LinkOptions, NodeLink
from runner_svc.nodes.ring_reader import MakeRing

_HELLO_S = 0.5
_WARN_S = 30.0
_FIRST_WARN_S = 5.0
_UNUSABLE = 2

log = structlog.get_logger()


class Spoke(NodeLink):
    """The link of a node other than 0."""

    def __init__(
        self,
        mirror: Mirror,
        options: LinkOptions,
        ring: MakeRing,
        keys: GroupKeys | None,
    ) -> None:
        super().__init__(mirror, options)
        self._keys = keys
        self._ring = ring(str)  # which is not asked: this thread never waits for room
        self._next = 1  # number of the next record of the prepared epoch
        self._unwritten: deque[bytes] = deque()  # for which the ring had no room yet
        self._others = mirror.node.others
        self._name, self._launcher = f"{socket.gethostname()}, launcher {os.getpid()}", secrets.token_hex(8)
        self._is_welcome, self._silent_s = False, 0.0
        self._hello_at, self._warn_at = 0.0, time.monotonic() + _FIRST_WARN_S
        self._connect()

    def _connect(self) -> None:
        self._open(zmq.DEALER)
        if self._keys is not None:
            self._keys.protect_client(self._socket)
        self._socket.connect(self._options.endpoint)
        self._news = News()

    def _turn(self, elapsed_s: float, beats: bool) -> None:
        self._receive(elapsed_s)
        if self.verdict is not None:
            return None
        mirror = self._mirror
        if mirror.may_prepare:
            epoch = mirror.board.epoch
            self._ring.restart()
            self._ring.begin()
            self._unwritten.clear()
            mirror.prepared, self._next = epoch, 1
        mirror.show()
        self._write()
        if not self._is_welcome:
            return self._ask()
        state = self._news.of(mirror, mirror.own_rows(), beats)
        if state is not None:
            self._send(state)
        return None

    def _ask(self) -> None:
        now = time.monotonic()
        if now >= self._hello_at:
            self._hello_at = now + _HELLO_S
            self._send(Hello(self._mirror.node.number, self._name, self._launcher, self._options.facts))
        if now >= self._warn_at:
            self._warn_at = now + _WARN_S
            log.warning("node 0 does not answer", rdzv_endpoint=self._options.endpoint)

    # ------------------------------------------------------------------ messages

    def _receive(self, elapsed_s: float) -> None:
        self._silent_s += elapsed_s
        while self._socket.poll(0):
            try:
                message = read(self._socket.recv())
            except BadMessage as error:
                log.warning("nodes: ignored a message", reason=str(error))
                continue
            self._silent_s = 0.0
            self._handle(message)
        if self._is_welcome and self._silent_s > self._options.timeout_s:
            self._lose(f"node 0 was silent for {self._silent_s:.1f} s")
            self._socket.close(linger=0)
            self._connect()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Record):
            self._deliver(message)
        elif isinstance(message, State):
            self._mirror.hear(message, self._others)
            self._mirror.show()  # before the records that follow
            epoch, number = message.passed_on
            if self._is_in(epoch) and number >= self._next:
                self._miss(epoch, number)
        elif isinstance(message, Welcome):
            self._is_welcome, self._news = True, News()
            log.info("this node takes part", node=self._mirror.node.number, rdzv_endpoint=self._options.endpoint)
        elif isinstance(message, Again):
            if self._is_welcome:
                self._lose("node 0 has lost this node, or has started again")
        elif isinstance(message, Refusal):
            self.verdict = End(_UNUSABLE, message.why)
        elif isinstance(message, End):
            self.verdict = End(message.status, f"node 0 has ended{': ' if message.why else ''}{message.why}")

    def _deliver(self, record: Record) -> None:
        """Writes a record to the ring, unless its epoch is over. One that is missing ends the epoch."""
        if not self._is_in(record.epoch):
            return
        if record.number != self._next:
            self._miss(record.epoch, record.number)
            return
        self._next += 1
        self._unwritten.append(framed(record.body))
        self._write()

    def _write(self) -> None:
        """Writes what the ring has room for. A rank that lags behind must not keep this thread from other messages."""
        while self._unwritten:
            data = self._unwritten.popleft()
            if rest := data[self._ring.write_some(data) :]:
                self._unwritten.appendleft(rest)
                return

    def _is_in(self, epoch: int) -> bool:
        return epoch == self._mirror.prepared and self._mirror.board.given_up < epoch

    def _miss(self, epoch: int, number: int) -> None:
        why = (
            f"node {self._mirror.node.number} missed what rank 0 passed on: record {self._next}, when {number} was sent"
        )
        log.warning("the link between nodes lost a record", reason=why)
        self._mirror.board.give_up(epoch, why)

    def _lose(self, why: str) -> None:
        self._is_welcome, self._hello_at, self._warn_at = False, 0.0, time.monotonic() + _FIRST_WARN_S
        log.warning("node 0 is lost", reason=why)
        self._mirror.forget(self._others, why)

    def _send(self, message: Message) -> None:
        with suppress(zmq.Again):  # node 0 reads nothing: it will be lost by its silence
            self._socket.send(packed(message), zmq.NOBLOCK)

    def _say_goodbye(self, end: End) -> None:
        if self._is_welcome:
            self._send(end)
        self._socket.close()
