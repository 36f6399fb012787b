"""Log-probabilities of one request's prompt: each position once and in order, from the rows of any choice.

Every choice computes the whole prompt, on any runner, and from its beginning again after a preemption, a loss or a
takeover. So the rows overlap, and all rows agree on a position.
"""

from __future__ import annotations

from roster_protos import plan_pb2


class PromptLogprobs:
    """The positions known so far. The prompt's first token has no log-probability."""

    __slots__ = ("_parts", "next_position")

    def __init__(self) -> None:
        self.next_position = 1
        """The first unknown position."""
        self._parts: list[plan_pb2.RowLogprobs] = []

    def add(self, row: plan_pb2.RowLogprobs) -> plan_pb2.RowLogprobs | None:
        """Adds the new part of `row` and returns it; None if nothing is new.

        A row behind a gap is ignored: the choice that computes the missing positions computes those of the row again.
        """
        known = self.next_position - row.first_position
        count = len(row.values) // 4
        if not 0 <= known < count:
            return None
        part = row if not known else _without_first(row, known)
        self._parts.append(part)
        self.next_position += count - known
        return part

    def joined(self) -> plan_pb2.RowLogprobs | None:
        """Returns everything known as one row; None if nothing is."""
        return joined(self._parts) if self._parts else None


def joined(parts: list[plan_pb2.RowLogprobs]) -> plan_pb2.RowLogprobs:
    """Returns consecutive log-probabilities as one row; `parts` must not be empty."""
    return plan_pb2.RowLogprobs(
        first_position=parts[0].first_position,
        top=parts[0].top,
        values=b"".join(part.values for part in parts),
        top_ids=b"".join(part.top_ids for part in parts),
        top_values=b"".join(part.top_values for part in parts),
    )


def _without_first(row: plan_pb2.RowLogprobs, count: int) -> plan_pb2.RowLogprobs:
    """Returns the row without its first `count` positions."""
    return plan_pb2.RowLogprobs(
        row=row.row,
        first_position=row.first_position + count,
        top=row.top,
        values=row.values[4 * count :],
        top_ids=row.top_ids[4 * count * row.top :],
        top_values=row.top_values[4 * count * row.top :],
    )
