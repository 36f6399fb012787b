"""Memory in which blocks leave sums for each other."""

from __future__ import annotations

import ctypes

import pytest
import torch

from runner_svc.cuda.int4.parts_room import MOST_FLAGS, PartsRoom

CPU = torch.device("cpu")


def test_what_was_given_stays_when_the_room_grows() -> None:
    room = PartsRoom()
    first, flags = room.of(1000, 10, CPU)
    ctypes.memset(first, 7, 1000)
    assert not any(ctypes.string_at(flags, 4 * MOST_FLAGS))
    larger, same = room.of(1 << 20, MOST_FLAGS, CPU)
    ctypes.memset(larger, 8, 1 << 20)
    assert same == flags
    assert ctypes.string_at(first, 1000) == b"\7" * 1000
    assert room.of(2000, 1, CPU) == (larger, flags)


def test_more_flags_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="4097 flags"):
        PartsRoom().of(1, MOST_FLAGS + 1, CPU)
