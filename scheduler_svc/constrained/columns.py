"""How masks are asked for, and what comes back beside the masks themselves: columns, little-endian.

Each is packed as a whole, and counts are left out where each row has one token, as nearly always: a row costs a small
fraction of a microsecond.
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

    ids: array[int]
    """Of the matchers; "q"."""
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
        one_each, told = _one_each(self.tokens) if not self.drafts else None, list[int]()
        if one_each is not None:
            counts, drafts, told = [], 0, one_each
        else:
            counts = [*map(len, self.tokens), *map(len, self.drafts if any(self.drafts) else ())]
            drafts = sum(counts[len(self.ids) :])
            told = [*chain.from_iterable(self.tokens), *chain.from_iterable(self.drafts)]
        flags = self.forced * _FORCED | (one_each is not None) * _ONE_EACH
        head = _ASK.pack(len(self.ids), len(self.dropped), len(told) - drafts, drafts, flags)
        return b"".join((head, self.ids, array("q", self.dropped), array("i", counts), array("i", told)))

    @classmethod
    def decode(cls, frame: bytes) -> MaskAsk:
        """The contrary of `encode`."""
        rows, num_dropped, num_tokens, num_drafts, flags = _ASK.unpack_from(frame)
        first = _ASK.size + 8 * (rows + num_dropped)
        longs, values = array("q", frame[_ASK.size : first]), array("i", frame[first:]).tolist()
        ids, dropped, forced = longs[:rows], longs[rows:], bool(flags & _FORCED)
        if flags & _ONE_EACH:
            return cls(ids, [[token] for token in values], (), forced, dropped)
        counted = 2 * rows if num_drafts else rows
        counts, end = values[:counted], counted + num_tokens
        tokens = split(values[counted:end], counts[:rows])
        drafts = split(values[end:], counts[rows:]) if num_drafts else ()
        return cls(ids, tokens, drafts, forced, dropped)


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


def _one_each(tokens: list[list[int]]) -> list[int] | None:
    """The token of each row; None where one has more, or none."""
    try:
        return [token for (token,) in tokens]
    except ValueError:
        return None


def split(values: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Consecutive parts of these lengths."""
    if not values:
        return [[]] * len(counts)
    return [list(values[begin:end]) for begin, end in pairwise(accumulate(counts, initial=0))]
