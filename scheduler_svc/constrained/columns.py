"""How masks are asked for, and what comes back beside the masks themselves: columns, little-endian.

Lists of Python integers are packed by `array`: a row costs a fraction of a microsecond, whatever the plan.
"""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

_ASK = struct.Struct("<5I")  # rows, dropped matchers, tokens, draft tokens, are forced tokens asked for?
_ANSWER = struct.Struct("<2I")  # forced tokens, bytes of the failures


@dataclass(slots=True)
class MaskAsk:
    """The rows of one plan. All lists but `dropped` are by row."""

    ids: list[int]
    """Of the matchers."""
    tokens: list[list[int]]
    """That the matcher lacks."""
    drafts: list[list[int]]
    """That may follow: a mask is made before the first and behind each."""
    forced: bool = False
    """Are the tokens asked for that must come next?"""
    dropped: list[int] = field(default_factory=list)
    """Matchers that are not needed any more."""

    @property
    def num_positions(self) -> int:
        """Masks that there is to be room for."""
        return len(self.ids) + sum(map(len, self.drafts))

    def encode(self) -> bytes:
        """The frame."""
        token_counts, draft_counts = array("i", map(len, self.tokens)), array("i", map(len, self.drafts))
        tokens, drafts = array("i"), array("i")
        for row in self.tokens:
            tokens.extend(row)
        for row in self.drafts:
            drafts.extend(row)
        head = _ASK.pack(len(self.ids), len(self.dropped), len(tokens), len(drafts), self.forced)
        ids = array("q", self.ids), array("q", self.dropped)
        return b"".join((head, *(column.tobytes() for column in (*ids, token_counts, draft_counts, tokens, drafts))))

    @classmethod
    def decode(cls, frame: bytes) -> MaskAsk:
        """The contrary of `encode`."""
        rows, num_dropped, num_tokens, num_drafts, forced = _ASK.unpack_from(frame)
        longs, ints = array("q"), array("i")
        middle = _ASK.size + 8 * (rows + num_dropped)
        longs.frombytes(frame[_ASK.size : middle])
        ints.frombytes(frame[middle : middle + 4 * (2 * rows + num_tokens + num_drafts)])
        values = ints.tolist()
        token_counts, draft_counts, rest = values[:rows], values[rows : 2 * rows], values[2 * rows :]
        ids = longs.tolist()
        tokens, drafts = rest[:num_tokens], rest[num_tokens:]
        return cls(ids[:rows], split(tokens, token_counts), split(drafts, draft_counts), bool(forced), ids[rows:])


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
        tokens = array("i")
        for row in self.forced:
            tokens.extend(row)
        counts = array("i", map(len, self.forced))
        head = _ANSWER.pack(len(counts), len(failures))
        return b"".join((head, array("i", self.positions).tobytes(), counts.tobytes(), tokens.tobytes(), failures))

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
    return [values[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
