"""Log-probabilities of one request's prompt: each position once and in order, whichever choice's rows bring it.

Every choice computes the whole prompt, on whichever runner it is, and from its beginning again after a preemption, a
loss or a takeover. So the rows overlap, and all that have been seen say the same of a position.
"""

from __future__ import annotations

from roster_protos import plan_pb2


class PromptLogprobs:
    """What is known so far. The prompt's first token has none."""

    __slots__ = ("_parts", "next_position")

    def __init__(self) -> None:
        self.next_position = 1
        """The first position that is not known."""
        self._parts: list[plan_pb2.RowLogprobs] = []

    def add(self, row: plan_pb2.RowLogprobs) -> plan_pb2.RowLogprobs | None:
        """Takes what is new in `row`, and returns it; None if nothing is.

        A row behind a gap is left out: whoever computes the positions in between computes those of the row again.
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
        """All of them as one row; None if there are none."""
        return joined(self._parts) if self._parts else None


def joined(parts: list[plan_pb2.RowLogprobs]) -> plan_pb2.RowLogprobs:
    """Consecutive log-probabilities as one row; `parts` must not be empty."""
    return plan_pb2.RowLogprobs(
        first_position=parts[0].first_position,
        top=parts[0].top,
        values=b"".join(part.values for part in parts),
        top_ids=b"".join(part.top_ids for part in parts),
        top_values=b"".join(part.top_values for part in parts),
    )


def _without_first(row: plan_pb2.RowLogprobs, count: int) -> plan_pb2.RowLogprobs:
    """The row from its position `count` on."""
    return plan_pb2.RowLogprobs(
        row=row.row,
        first_position=row.first_position + count,
        top=row.top,
        values=row.values[4 * count :],
        top_ids=row.top_ids[4 * count * row.top :],
        top_values=row.top_values[4 * count * row.top :],
    )
