"""What launchers of one group's hosts (nodes) send one another: the messages, and their bytes.

Node 0 has a ROUTER socket, each other node a DEALER socket, so nodes other than 0 talk through it.

| message | from | when | carries |
|---|---|---|---|
| Hello | a node | every half second until it is welcome | its number and name, what has to be equal |
| Welcome | node 0 | it takes part | |
| Again | node 0 | it has spoken without being welcome, as after node 0 has started again | |
| State | both | when something changes; all at each heartbeat | the greatest epoch that was given up, and why; rows of
the board: of the node's own ranks, from node 0 of those of all other nodes; the number of the last Record |
| Record | node 0 | rank 0 has written to its ring | the epoch, its number in it, from 1 without gaps, the bytes |
| End | both | the launcher ends | its exit status, and why. From node 0 it ends the group, else only the node |
| Refusal | node 0 | the node can't take part | a sentence that says what to change |

A State is idempotent, and each value in it has one writer, so a lost one is made up for by the next. A lost Record is
noticed by the number of the next one, or by that of the next State. What ranks had noted before rank 0 wrote a record
is in a State before it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from runner_svc.group.board import ROW_BYTES

MOST_BYTES = 1 << 30
"""Longer messages are no plans of a scheduler."""
_STATE, _ROW, _RECORD, _END = struct.Struct("<QQQHH"), struct.Struct("<H"), struct.Struct("<QQ"), struct.Struct("<i")


class BadMessage(ValueError):
    """Bytes that are no message; the text says why."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A node asks to take part."""

    node: int
    name: str
    """Its host and launcher, for messages."""
    launcher: str
    """Random text that no other launcher has: those in containers may all have the same name."""
    facts: Mapping[str, str]
    """What has to equal that of node 0, by name."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The node takes part."""


@dataclass(frozen=True, slots=True)
class Again:
    """The sender is unknown: it is to say Hello again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The node can't take part."""

    why: str


@dataclass(frozen=True, slots=True)
class State:
    """What changed on the sender's board, or all."""

    given_up: int
    why: str = ""
    rows: Mapping[int, bytes] = field(default_factory=dict)
    """`Board.row` by rank."""
    passed_on: tuple[int, int] = (0, 0)
    """The epoch and number of the last Record before; from node 0."""


@dataclass(frozen=True, slots=True)
class Record:
    """What rank 0 has passed on."""

    epoch: int
    number: int
    body: bytes


@dataclass(frozen=True, slots=True)
class End:
    """The sender's launcher ends."""

    status: int
    why: str = ""


Message = Hello | Welcome | Again | Refusal | State | Record | End
_KINDS: dict[type[Message], bytes] = {
    Hello: b"H", Welcome: b"W", Again: b"A", Refusal: b"X", State: b"S", Record: b"R", End: b"E",
}  # fmt: skip


def packed(message: Message) -> bytes:
    """Returns a message as bytes."""
    return _KINDS[type(message)] + _body(message)


def _body(message: Message) -> bytes:
    match message:
        case Hello(node, name, launcher, facts):
            said = {"node": node, "name": name, "launcher": launcher, "facts": dict(facts)}
            return json.dumps(said).encode()
        case Refusal(why):
            return why.encode()
        case State(given_up, why, rows, passed_on):
            told = why.encode()[:1000]
            listed = [_ROW.pack(rank) + row for rank, row in rows.items()]
            return b"".join([_STATE.pack(given_up, *passed_on, len(told), len(rows)), told, *listed])
        case Record(epoch, number, body):
            return _RECORD.pack(epoch, number) + body
        case End(status, why):
            return _END.pack(status) + why.encode()
        case _:
            return b""


def read(data: bytes) -> Message:
    """Returns the message of `data`. Raises BadMessage."""
    kind, body = data[:1], data[1:]
    try:
        if kind == b"R":
            epoch, number = _RECORD.unpack_from(body)
            return Record(epoch, number, body[_RECORD.size :])
        if kind == b"S":
            return _read_state(body)
        if kind == b"H":
            return _read_hello(json.loads(body))
        if kind == b"X":
            return Refusal(body.decode())
        if kind == b"E":
            (status,) = _END.unpack_from(body)
            return End(status, body[_END.size :].decode())
        if data == b"W":
            return Welcome()
        if data == b"A":
            return Again()
    except (struct.error, ValueError, RecursionError) as error:
        raise BadMessage(f"a message of kind {kind!r} can't be read: {error}") from error
    raise BadMessage(f"no message is of kind {kind!r}")


def _read_state(body: bytes) -> State:
    given_up, epoch, number, told, count = _STATE.unpack_from(body)
    begin = _STATE.size + told
    each = _ROW.size + ROW_BYTES
    if len(body) != begin + count * each:
        raise BadMessage(f"a state of {count} rows has {len(body)} bytes instead of {begin + count * each}")
    rows = {}
    for place in range(begin, len(body), each):
        (rank,) = _ROW.unpack_from(body, place)
        rows[rank] = body[place + _ROW.size : place + each]
    return State(given_up, body[_STATE.size : begin].decode("utf-8", "ignore"), rows, (epoch, number))


def _read_hello(said: object) -> Hello:
    match said:
        case {"node": int(node), "name": str(name), "launcher": str(launcher), "facts": dict(facts)} if all(
            isinstance(value, str) for value in facts.values()
        ):
            return Hello(node, name, launcher, facts)
    raise BadMessage("a hello has a node, a name, a launcher and facts")
