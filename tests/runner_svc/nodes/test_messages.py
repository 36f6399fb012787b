"""What launchers send one another is read as it was meant, and any other bytes are refused without harm."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner_svc.group.board import ROW_BYTES
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
from tests.support.thoroughness import count

MESSAGES = [
    Hello(1, "host, launcher 7", "0123456789abcdef", {"version": "roster 1 (commit abc)", "slots": "null"}),
    Welcome(),
    Again(),
    Refusal("node 1 can't take part: ä"),
    State(3, "rank 2 (pid 7) was ended by signal 9", {1: b"a" * ROW_BYTES, 63: bytes(ROW_BYTES)}, (4, 77)),
    State(0),
    Record(4, 1, b""),
    Record(2**40, 2**50, b"x" * 3000),
    End(0),
    End(2, "kv_tokens is 1"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_packed(message: Message) -> None:
    assert read(packed(message)) == message


@given(st.binary(max_size=60), st.sampled_from(MESSAGES), st.integers(0, 200))
@settings(max_examples=count(2000, in_ci=60), deadline=None)
def test_other_bytes_are_refused_or_a_message(noise: bytes, message: Message, cut: int) -> None:
    whole = packed(message)
    for data in (noise, whole[:1] + noise, whole[:cut] + noise, whole[:-1]):
        try:
            again = read(data)
        except BadMessage:
            continue
        assert packed(again)
