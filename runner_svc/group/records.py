"""What rank 0 tells the other ranks: each call that changes a runner's state, in order."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

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


@dataclass(frozen=True, slots=True)
class Record:
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
        return cls(Kind(kind), number, packed[_HEAD.size :])
