"""How masks are asked for, and what comes back beside the masks themselves: columns, little-endian.

Lists of Python integers are packed by `array`: a row costs a fraction of a microsecond, whatever the plan.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

_ASK = struct.Struct("<5I")  # rows, dropped matchers, tokens, draft tokens, are forced tokens asked for?
_ANSWER = struct.Struct("<2I")  # forced tokens, bytes of the failures


@dataclass(slots=True)
class MaskAsk:
    """The rows of one plan. All lists but `dropped` are by row."""

    ids: list[int]
    """Of the matchers."""
    tokens: list[list[int]]
    """That the matcher lacks."""
    drafts: Sequence[Sequence[int]] = ()
    """That may follow: a mask is made before the first and behind each. Empty where no row has any."""
    forced: bool = False
    """Are the tokens asked for that must come next?"""
    dropped: Sequence[int] = ()
    """Matchers that are not needed any more."""

    @property
    def num_positions(self) -> int:
        """Masks that there is to be room for."""
        return len(self.ids) + sum(map(len, self.drafts))

    def encode(self) -> bytes:
        """The frame."""
        tokens, drafts = array("i", chain.from_iterable(self.tokens)), array("i", chain.from_iterable(self.drafts))
        head = _ASK.pack(len(self.ids), len(self.dropped), len(tokens), len(drafts), self.forced)
        ids = array("q", self.ids), array("q", self.dropped)
        counts = array("i", map(len, self.tokens)), array("i", map(len, self.drafts) if drafts else ())
        return b"".join((head, *ids, *counts, tokens, drafts))

    @classmethod
    def decode(cls, frame: bytes) -> MaskAsk:
        """The contrary of `encode`."""
        rows, num_dropped, num_tokens, num_drafts, forced = _ASK.unpack_from(frame)
        longs, ints = array("q"), array("i")
        middle = _ASK.size + 8 * (rows + num_dropped)
        longs.frombytes(frame[_ASK.size : middle])
        ints.frombytes(frame[middle:])
        ids, values = longs.tolist(), ints.tolist()
        counts = 2 * rows if num_drafts else rows
        tokens = split(values[counts : counts + num_tokens], values[:rows])
        drafts = split(values[counts + num_tokens :], values[rows:counts]) if num_drafts else ()
        return cls(ids[:rows], tokens, drafts, bool(forced), ids[rows:])


@dataclass(slots=True)
class MaskAnswer:
    """What came of a MaskAsk; the masks lie in the shared memory, 1 + len(draft) places a row."""

    positions: list[int]
    """By row, the masks that were made: those behind a draft token that is not allowed were not."""
    failures: list[tuple[int, str]]
    """(index of the row, why): its matcher has failed, and its one mask allows everything."""
    forced: list[list[int]] = field(default_factory=list)
    """By row, if they were asked for, the tokens that must come next."""

    def encode(self) -> bytes:
        """The frame."""
        failures = json.dumps(self.failures).encode() if self.failures else b""
        tokens = array("i", chain.from_iterable(self.forced))
        counts = array("i", map(len, self.forced))
        head = _ANSWER.pack(len(counts), len(failures))
        return b"".join((head, array("i", self.positions), counts, tokens, failures))

    @classmethod
    def decode(cls, frame: bytes, rows: int) -> MaskAnswer:
        """The contrary of `encode`, of so many rows."""
        num_forced, num_bytes = _ANSWER.unpack_from(frame)
        end = len(frame) - num_bytes
        ints = array("i")
        ints.frombytes(frame[_ANSWER.size : end])
        values = ints.tolist()
        counts = values[rows : rows + num_forced]
        failures = [(index, why) for index, why in json.loads(frame[end:])] if num_bytes else []
        return cls(values[:rows], failures, split(values[rows + num_forced :], counts))


def split(values: list[int], counts: list[int]) -> list[list[int]]:
    """Consecutive parts of these lengths."""
    if not values:
        return [[]] * len(counts)
    if len(values) == len(counts) and max(counts) == 1:  # as nearly always: a token a row
        return [[value] for value in values]
    return [values[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
