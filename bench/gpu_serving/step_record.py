"""Record of a runner's steps, and selections from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """Columns of S steps. Times are in nanoseconds of the machine's monotonic clock, durations in nanoseconds."""

    rows: NDArray[np.int64]  # [S]
    positions: NDArray[np.int64]
    context: NDArray[np.int64]  # positions whose KV the rows read
    prefill_pairs: NDArray[np.int64]  # (query, key) pairs of rows of more than one position
    received: NDArray[np.int64]  # the plan was received
    launch_begin: NDArray[np.int64]
    launch_end: NDArray[np.int64]
    done: NDArray[np.int64]  # the waiting thread has the result
    posted: NDArray[np.int64]  # the result was sent
    idle: NDArray[np.int64]  # durations, as the runner reports them to the scheduler
    prepare: NDArray[np.int64]
    forward: NDArray[np.int64]
    sample: NDArray[np.int64]
    drafts: NDArray[np.int64]  # [S] most tokens that the rows could draft
    drafted: NDArray[np.int64]  # drafted tokens that were verified
    accepted: NDArray[np.int64]  # those of them that were accepted

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> StepRecord:
        """Builds the record from one sequence per step."""
        width = len(fields(cls))
        return cls(*np.array([row for row in rows if len(row) == width], np.int64).reshape(-1, width).T)

    @classmethod
    def load(cls, path: Path) -> StepRecord:
        """Reads a file that `save` wrote."""
        with np.load(path) as arrays:
            return cls(**arrays)

    def save(self, path: Path) -> None:
        """Writes an .npz file."""
        np.savez(path, **asdict(self))

    def between(self, begin: int, end: int) -> StepRecord:
        """Returns the steps whose plans were received between the two times."""
        return self._where((self.received >= begin) & (self.received < end))

    @property
    def mixed(self) -> NDArray[np.bool_]:
        """Whether each step computes parts of prompts."""
        return self.positions - self.drafts > self.rows

    @property
    def verifying(self) -> NDArray[np.bool_]:
        """Whether each step may verify drafts."""
        return self.drafts > 0

    def full_decode(self, batch: int) -> StepRecord:
        """Returns the decode steps of `batch` rows that follow another such step."""
        full = (self.rows == batch) & (self.positions == batch)
        full[1:] &= full[:-1].copy()
        full[:1] = False
        return self._where(full)

    def _where(self, chosen: NDArray[np.bool_]) -> StepRecord:
        return StepRecord(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def host_parts_us(self, depth: int) -> dict[str, NDArray[np.float64]]:
        """Returns the µs of each stage between a result and the launch that it allows, for consecutive steps."""
        following = self.received[depth:] if depth < len(self.received) else self.received[:0]
        done, posted = self.done[: len(following)], self.posted[: len(following)]
        parts = {
            "result to socket": self.posted - self.done,
            "engine's turn": following - posted,
            "socket to launch": self.launch_begin - self.received,
            "launch": self.launch_end - self.launch_begin,
            "result to launched": self.launch_end[depth:] - done,
        }
        return {name: values / 1e3 for name, values in parts.items()}
