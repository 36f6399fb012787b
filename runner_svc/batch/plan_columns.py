"""The packed columns of a plan as numpy arrays, and the error for a plan that can't be executed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2


class PlanFault(Exception):
    """A plan was refused before it changed anything, or failed during execution.

    The text says which, and why. No further plan may execute in its session.
    """


def int32_column(name: str, data: bytes) -> NDArray[np.int32]:
    """Returns a read-only view of little-endian int32 `data`. Raises PlanFault if its length is not a multiple of 4."""
    if len(data) % 4:
        raise PlanFault(f"{name} has {len(data)} bytes, must be a multiple of 4")
    return np.frombuffer(data, "<i4")


@dataclass(slots=True, eq=False)
class PlanColumns:
    """The columns of one plan: int32, except flags, drafts and numbers of forced tokens (uint8).

    Columns of one table have equal lengths.
    """

    releases: NDArray[np.int32]
    append_slots: NDArray[np.int32]
    append_indexes: NDArray[np.int32]
    append_blocks: NDArray[np.int32]
    copy_sources: NDArray[np.int32]
    copy_targets: NDArray[np.int32]
    extent_slots: NDArray[np.int32]
    extent_starts: NDArray[np.int32]
    extent_counts: NDArray[np.int32]
    extent_flags: NDArray[np.uint8]
    extent_drafts: NDArray[np.uint8]  # empty if no row drafts
    extent_forced: NDArray[np.uint8]  # empty if no token is appended
    forced_tokens: NDArray[np.int32]  # [extent_forced.sum()]

    @classmethod
    def read(cls, plan: plan_pb2.Plan) -> PlanColumns:
        """Returns views into the plan's bytes. Raises PlanFault if lengths disagree."""
        columns = cls(
            int32_column("releases", plan.releases),
            int32_column("append_slots", plan.append_slots),
            int32_column("append_indexes", plan.append_indexes),
            int32_column("append_blocks", plan.append_blocks),
            int32_column("copy_sources", plan.copy_sources),
            int32_column("copy_targets", plan.copy_targets),
            int32_column("extent_slots", plan.extent_slots),
            int32_column("extent_starts", plan.extent_starts),
            int32_column("extent_counts", plan.extent_counts),
            np.frombuffer(plan.extent_flags, np.uint8),
            np.frombuffer(plan.extent_drafts, np.uint8),
            np.frombuffer(plan.extent_forced, np.uint8),
            int32_column("forced_tokens", plan.forced_tokens),
        )
        require_equal("append", columns.append_slots, columns.append_indexes, columns.append_blocks)
        require_equal("copy", columns.copy_sources, columns.copy_targets)
        require_equal(
            "extent", columns.extent_slots, columns.extent_starts, columns.extent_counts, columns.extent_flags
        )
        if len(columns.extent_drafts):
            require_equal("extent", columns.extent_slots, columns.extent_drafts)
        if len(columns.extent_forced):
            require_equal("extent", columns.extent_slots, columns.extent_forced)
        num_forced = int(columns.extent_forced.sum(dtype=np.int64))
        if num_forced != len(columns.forced_tokens):
            raise PlanFault(f"there are {len(columns.forced_tokens)} forced tokens, the rows have {num_forced}")
        return columns


def require_equal(table: str, *columns: NDArray) -> None:
    """Raises PlanFault unless the columns of a table have equal lengths."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise PlanFault(f"the {table} columns have different lengths: {lengths}")


def require(table: str, bad: NDArray[np.bool_], text: str, *values: NDArray) -> None:
    """Raises PlanFault about the first `bad` row, if any; `text` is formatted with that row of `values`."""
    if bad.any():
        row = int(bad.argmax())
        raise PlanFault(f"{table} {row}: " + text.format(*(int(column[row]) for column in values)))
