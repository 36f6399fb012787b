"""Encoding of a request for masks and of its answer (the masks themselves go by shared memory): little-endian columns.

Each column is packed as a whole. Counts are omitted in the common case of one token per row. A row costs a small
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
_FORCED = 1  # forced tokens are requested
_ONE_EACH = 2  # one token per row and no drafts: the counts are omitted
_ANSWER = struct.Struct("<3I")  # rows that have positions, rows that have forced tokens, bytes of the failures
_PLAIN = _ANSWER.pack(0, 0, 0)  # the common case


@dataclass(slots=True)
class MaskAsk:
    """Request for the masks of one plan's rows. All lists but `dropped` have one entry per row."""

    ids: array[int]
    """Ids of the matchers; typecode "q"."""
    tokens: list[list[int]]
    """Tokens that the matcher lacks."""
    drafts: Sequence[Sequence[int]] = ()
    """Draft tokens after those: a mask is made before the first and after each. Empty if no row has any."""
    forced: bool = False
    """Whether the answer lists the tokens that must come next, and the matchers take them. Not together with drafts."""
    dropped: Sequence[int] = ()
    """Ids of matchers that are no longer needed."""

    @property
    def num_positions(self) -> int:
        """Number of masks that the shared memory must have room for."""
        return len(self.ids) + sum(map(len, self.drafts))

    def encode(self) -> bytes:
        """Returns the frame's body."""
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
        """Inverse of `encode`."""
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
    """Answer to a MaskAsk. The masks are in the shared memory, with 1 + len(draft) places per row."""

    positions: list[int]
    """Masks made, by row; none is made after a draft token that is not allowed. Empty: one per row."""
    failures: list[tuple[int, str]]
    """(index, reason) of each row whose matcher has failed; its only mask allows every token."""
    forced: list[list[int]] = field(default_factory=list)
    """Tokens that must come next, by row; empty unless requested, and if no row has any."""

    def encode(self) -> bytes:
        """Returns the frame's body."""
        if not self.positions and not self.failures and not self.forced:
            return _PLAIN
        failures = json.dumps(self.failures).encode() if self.failures else b""
        head = _ANSWER.pack(len(self.positions), len(self.forced), len(failures))
        columns = array("i", [*self.positions, *map(len, self.forced), *chain.from_iterable(self.forced)])
        return b"".join((head, columns, failures))

    @classmethod
    def decode(cls, frame: bytes) -> MaskAnswer:
        """Inverse of `encode`."""
        if frame == _PLAIN:
            return cls([], [])
        rows, num_forced, num_bytes = _ANSWER.unpack_from(frame)
        end = len(frame) - num_bytes
        values = array("i", frame[_ANSWER.size : end]).tolist()
        counts = values[rows : rows + num_forced]
        failures = [(index, why) for index, why in json.loads(frame[end:])] if num_bytes else []
        return cls(values[:rows], failures, split(values[rows + num_forced :], counts))


def first_places(rows: int, drafts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Returns the index of each row's first mask. A row has 1 + len(draft) masks, or one if no row has a draft."""
    if not drafts:
        return range(rows)
    return list(accumulate((1 + len(draft) for draft in drafts[:-1]), initial=0))


def _one_each(tokens: list[list[int]]) -> list[int] | None:
    """Returns the token of each row, or None if a row does not have exactly one."""
    try:
        return [token for (token,) in tokens]
    except ValueError:
        return None


def split(values: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Splits `values` into consecutive parts with the lengths `counts`."""
    if not values:
        return [[]] * len(counts)
    return [list(values[begin:end]) for begin, end in pairwise(accumulate(counts, initial=0))]
