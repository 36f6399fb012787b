"""Converts a recording to lanes: one per slot of each runner, with the spans of a sequence's prefill and decode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from roster_client.timeline.recording import Recording, Row, RowKind, Step


@dataclass(slots=True)
class Span:
    """Consecutive steps of a lane with the same sequence and kind; `first` and `last` are columns, counted from 0."""

    request: str
    kind: RowKind
    first: int
    last: int
    begin_s: float
    end_s: float
    tokens: int
    drafted: int = 0
    accepted: int = 0
    forced: int = 0


@dataclass(slots=True)
class Lane:
    """A slot of a runner."""

    runner: str
    slot: int
    spans: list[Span] = field(default_factory=list)

    def take(self, step: Step, column: int, row: Row) -> None:
        """Adds the slot's row of a step."""
        last = self.spans[-1] if self.spans else None
        if last is None or (last.request, last.kind, last.last) != (row.request, row.kind, column - 1):
            last = Span(row.request, row.kind, column, column, step.begin_s, step.end_s, 0)
            self.spans.append(last)
        last.last, last.end_s = column, step.end_s
        last.tokens += row.tokens
        last.drafted += row.drafted
        last.accepted += row.accepted
        last.forced += row.forced


@dataclass(slots=True, frozen=True)
class Occupancy:
    """Usage of the slots. A cell is a slot in a step."""

    cells: int
    empty: int
    empty_with_waiting: int
    """Empty cells of steps after which sequences still waited; another policy could have filled them."""

    @property
    def empty_share(self) -> float:
        """Empty cells as a share of all, 0 to 1."""
        return self.empty / max(1, self.cells)

    @property
    def wasted_share(self) -> float:
        """Cells that were empty while sequences waited, as a share of all, 0 to 1."""
        return self.empty_with_waiting / max(1, self.cells)


def lanes_of(recording: Recording) -> list[Lane]:
    """Returns the lanes of all runners, by runner and slot. A runner's steps are its columns, from 0 without gaps."""
    lanes: dict[tuple[str, int], Lane] = {}
    columns: dict[str, int] = {}
    for step in recording.steps:
        column = columns.get(step.runner, 0)
        columns[step.runner] = column + 1
        for slot in range(step.slots) if not column else ():
            lanes[step.runner, slot] = Lane(step.runner, slot)
        for row in step.rows:
            lanes[step.runner, row.slot].take(step, column, row)
    return sorted(lanes.values(), key=lambda lane: (lane.runner, lane.slot))


def num_columns(recording: Recording) -> int:
    """Returns the number of steps of the runner with the most."""
    counts: dict[str, int] = {}
    for step in recording.steps:
        counts[step.runner] = counts.get(step.runner, 0) + 1
    return max(counts.values(), default=0)


def occupancy(steps: Iterable[Step]) -> Occupancy:
    """Counts the cells of the steps."""
    cells = empty = wasted = 0
    for step in steps:
        idle = step.slots - len(step.rows)
        cells += step.slots
        empty += idle
        wasted += idle if step.waiting else 0
    return Occupancy(cells, empty, wasted)


def request_order(recordings: Iterable[Recording]) -> list[str]:
    """Returns every request once: those in headers, in that order, then the others as they appear."""
    seen: dict[str, None] = {}
    recordings = list(recordings)
    for recording in recordings:
        seen.update(dict.fromkeys(recording.requests))
    for recording in recordings:
        for step in recording.steps:
            seen.update(dict.fromkeys(row.request for row in step.rows))
    return list(seen)
