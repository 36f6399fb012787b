"""What rank 0 passes on to the other ranks: each call that changes a runner's state, in order."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple, Self

_HEAD = struct.Struct("<BQ")


class Kind(IntEnum):
    """A call of `Runner` or `LaunchedPlan`."""

    RESET = 1
    """Begin a session with empty slots; the body is the naming secret."""
    RESUME = 2
    """Begin a session that keeps the sequences; the body is the naming secret."""
    LAUNCH = 3
    """Launch the plan of the number; the body is the serialized `plan_pb2.Plan`."""
    MASK = 4
    """Masks for the plan of the number; the body is the serialized `plan_pb2.Masks`."""
    WAIT = 5
    """End the oldest plan, the one of the number."""
    STOP = 6
    """Rank 0 has drained and ends."""


_KINDS = {kind.value: kind for kind in Kind}


class Record(NamedTuple):
    """One call. `number`: that of its plan, or 0."""

    kind: Kind
    number: int = 0
    body: bytes = b""

    def packed(self) -> bytes:
        """Returns the record as bytes."""
        return _HEAD.pack(self.kind, self.number) + self.body

    @classmethod
    def read(cls, packed: bytes) -> Self:
        """Returns the record of `packed`."""
        kind, number = _HEAD.unpack_from(packed)
        return cls(_KINDS[kind], number, packed[_HEAD.size :])
