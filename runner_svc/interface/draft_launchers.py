"""Interfaces of the launchers of steps that verify drafts, implemented by `runner_svc.cuda.drafts`.

A slot's counter is its number of known tokens on the device. Admissions and `AcceptLauncher` write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """A step's rows on the device, int32 [R] each but for `offsets`; padding rows have the dummy slot and count 0."""

    slots: Tensor
    starts: Tensor
    """First positions; -1: that of the slot's last known token."""
    counts: Tensor
    """Positions; of a row with start -1, 1 + the most drafts."""
    limits: Tensor
    """Greatest position that a token of the row may have."""
    offsets: Tensor
    """[R + 1]: index of each row's first place in the step, then the number of places."""
    firsts: Tensor
    """First position of each row, filled by `PlaceLauncher`, as are the next two."""
    present: Tensor
    """Positions of each row that are computed; 0 for a row whose counter is beyond its limit."""
    drafted: Tensor
    """Drafts of each row that are verified."""


class ProposeLauncher(Protocol):
    """What drafts, such as `runner_svc.cuda.drafts.ngram.NgramDraft`. Must not read tokens at or beyond a counter."""

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor) -> None:
        """Fills `proposals`, int32 [R, S], for rows with start -1: at most `counts` - 1 ids, -1 behind them.

        Launched inside CUDA graphs: it must not wait for the device, nor allocate by the values of its input.
        """


class PlaceLauncher(Protocol):
    """Implemented by `runner_svc.cuda.drafts.place.PlaceDrafts`."""

    def __call__(self, stream: int, rows: DraftRows, proposals: Tensor | None) -> None: ...


class DraftedGatherLauncher(Protocol):
    """Implemented by `runner_svc.cuda.drafts.gather.GatherDrafted`."""

    def __call__(
        self, stream: int, rows: DraftRows, tokens: Tensor, positions: Tensor, slot_mapping: Tensor
    ) -> None: ...


class ExpandLauncher(Protocol):
    """Implemented by `runner_svc.cuda.drafts.records.ExpandRecords`."""

    def __call__(
        self, stream: int, records: Tensor, sampled: Tensor, rows: DraftRows, expanded: Tensor, stride: int
    ) -> None: ...


class AcceptLauncher(Protocol):
    """Implemented by `runner_svc.cuda.drafts.accept.AcceptDrafts`."""

    def __call__(
        self, stream: int, records: Tensor, draws: Tensor, finite: Tensor, outcomes: Tensor, stride: int
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftLaunchers:
    """The launchers over one token buffer, its counters and block tables."""

    ngram: ProposeLauncher
    place: PlaceLauncher
    gather: DraftedGatherLauncher
    expand: ExpandLauncher
    accept: AcceptLauncher
