"""What the recording runner wrote down of its steps, and what is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """Columns of S steps. Times in nanoseconds of the machine's monotonic clock, durations in nanoseconds."""

    rows: NDArray[np.int64]  # [S]
    positions: NDArray[np.int64]
    context: NDArray[np.int64]  # positions whose KV the rows read
    prefill_pairs: NDArray[np.int64]  # (query, key) pairs of rows of more than one position
    received: NDArray[np.int64]  # the plan is here
    launch_begin: NDArray[np.int64]
    launch_end: NDArray[np.int64]
    done: NDArray[np.int64]  # the result is known to the thread that waited for it
    posted: NDArray[np.int64]  # and sent
    idle: NDArray[np.int64]  # durations, as the runner tells the scheduler
    prepare: NDArray[np.int64]
    forward: NDArray[np.int64]
    sample: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> StepRecord:
        """From one sequence a step."""
        width = len(fields(cls))
        return cls(*np.array([row for row in rows if len(row) == width], np.int64).reshape(-1, width).T)

    @classmethod
    def load(cls, path: Path) -> StepRecord:
        """Reads what `save` wrote."""
        with np.load(path) as arrays:
            return cls(**arrays)

    def save(self, path: Path) -> None:
        """Writes an .npz file."""
        np.savez(path, **asdict(self))

    def between(self, begin: int, end: int) -> StepRecord:
        """The steps whose plans came in that time."""
        return self._where((self.received >= begin) & (self.received < end))

    def full_decode(self, batch: int) -> StepRecord:
        """Decode steps of `batch` rows that follow one of the same kind."""
        full = (self.rows == batch) & (self.positions == batch)
        full[1:] &= full[:-1].copy()
        full[:1] = False
        return self._where(full)

    def _where(self, chosen: NDArray[np.bool_]) -> StepRecord:
        return StepRecord(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def host_parts_us(self, depth: int) -> dict[str, NDArray[np.float64]]:
        """Where the microseconds go between a result and the launch that it allows, of consecutive steps."""
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
