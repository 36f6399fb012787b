"""How masks are asked for, and what comes back beside the masks themselves: columns, little-endian.

One call of `struct` packs all columns: a row costs a small fraction of a microsecond.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

_ASK = struct.Struct("<5I")  # rows, dropped matchers, tokens, draft tokens, flags
_FORCED = 1  # forced tokens are asked for
_ONE_EACH = 2  # a token a row and no drafts, so that there are no counts
_ANSWER = struct.Struct("<3I")  # rows that have positions, rows that have forced tokens, bytes of the failures
_PLAIN = _ANSWER.pack(0, 0, 0)  # as nearly always


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
        rows, dropped = len(self.ids), len(self.dropped)
        if not self.drafts:
            try:
                told = [token for (token,) in self.tokens]
            except ValueError:
                pass
            else:
                head = (rows, dropped, rows, 0, _ONE_EACH | self.forced)
                return struct.pack(f"<5I{rows + dropped}q{rows}i", *head, *self.ids, *self.dropped, *told)
        counts = [*map(len, self.tokens), *map(len, self.drafts if any(self.drafts) else ())]
        tokens, drafts = sum(counts[:rows]), sum(counts[rows:])
        return struct.pack(
            f"{_ASK.format}{rows + dropped}q{len(counts) + tokens + drafts}i",
            *(rows, dropped, tokens, drafts, self.forced),
            *self.ids,
            *self.dropped,
            *counts,
            *chain.from_iterable(self.tokens),
            *chain.from_iterable(self.drafts),
        )

    @classmethod
    def decode(cls, frame: bytes) -> MaskAsk:
        """The contrary of `encode`."""
        rows, num_dropped, num_tokens, num_drafts, flags = _ASK.unpack_from(frame)
        forced = bool(flags & _FORCED)
        if flags & _ONE_EACH:
            values = struct.unpack_from(f"<{rows + num_dropped}q{rows}i", frame, _ASK.size)
            told = values[rows + num_dropped :]
            return cls(list(values[:rows]), [[token] for token in told], (), forced, values[rows : rows + num_dropped])
        longs, counted = rows + num_dropped, 2 * rows if num_drafts else rows
        values = struct.unpack_from(f"<{longs}q{counted + num_tokens + num_drafts}i", frame, _ASK.size)
        counts, end = values[longs : longs + counted], longs + counted + num_tokens
        tokens = split(values[longs + counted : end], counts[:rows])
        drafts = split(values[end:], counts[rows:]) if num_drafts else ()
        return cls(list(values[:rows]), tokens, drafts, forced, values[rows:longs])


@dataclass(slots=True)
class MaskAnswer:
    """What came of a MaskAsk; the masks lie in the shared memory, 1 + len(draft) places a row."""

    positions: list[int]
    """By row, the masks that were made: those behind a draft token that is not allowed were not. Empty: one each."""
    failures: list[tuple[int, str]]
    """(index of the row, why): its matcher has failed, and its one mask allows everything."""
    forced: list[list[int]] = field(default_factory=list)
    """By row, if they were asked for, the tokens that must come next."""

    def encode(self) -> bytes:
        """The frame."""
        if not self.positions and not self.failures and not self.forced:
            return _PLAIN
        failures = json.dumps(self.failures).encode() if self.failures else b""
        head = _ANSWER.pack(len(self.positions), len(self.forced), len(failures))
        columns = array("i", [*self.positions, *map(len, self.forced), *chain.from_iterable(self.forced)])
        return b"".join((head, columns, failures))

    @classmethod
    def decode(cls, frame: bytes) -> MaskAnswer:
        """The contrary of `encode`."""
        if frame == _PLAIN:
            return cls([], [])
        rows, num_forced, num_bytes = _ANSWER.unpack_from(frame)
        end = len(frame) - num_bytes
        values = array("i", frame[_ANSWER.size : end]).tolist()
        counts = values[rows : rows + num_forced]
        failures = [(index, why) for index, why in json.loads(frame[end:])] if num_bytes else []
        return cls(values[:rows], failures, split(values[rows + num_forced :], counts))


def first_places(rows: int, drafts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Of each row, its first mask, counted in masks: 1 + len(draft) a row, and one where no row has a draft."""
    if not drafts:
        return range(rows)
    return list(accumulate((1 + len(draft) for draft in drafts[:-1]), initial=0))


def split(values: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Consecutive parts of these lengths."""
    if not values:
        return [[]] * len(counts)
    return [list(values[begin:end]) for begin, end in pairwise(accumulate(counts, initial=0))]
