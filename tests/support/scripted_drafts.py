"""Drafts whose numbers a test decides, in place of the policy and its step-time model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from unittest import mock

import numpy as np

from scheduler_svc.drafting.draft_lengths import Drafting
from scheduler_svc.drafting.draft_room import most_drafts
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.plan.slot_table import IntColumn
from scheduler_svc.scheduler.scheduler import Scheduler


class Script(Protocol):
    """What a test decides."""

    def wants(self) -> bool:
        """Returns whether the next plan may draft; if not, it may be derived from the one before."""

    def lengths(self, rows: int) -> Sequence[int]:
        """Returns the number of drafts of each row of a step, which may be more than the row can have."""


class Always:
    """Each row drafts `wanted` tokens, as far as it may."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted

    def wants(self) -> bool:
        return self.wanted > 0

    def lengths(self, rows: int) -> list[int]:
        return [self.wanted] * rows


class RandomDrafts:
    """Random numbers, often more than a row may have, and steps without any in which steady decode may go on."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def wants(self) -> bool:
        return self._rng.random() < 0.7

    def lengths(self, rows: int) -> list[int]:
        if self._rng.random() < 0.2:
            return [0] * rows
        return [self._rng.choice((0, 9, self._rng.randint(0, 9))) for _ in range(rows)]


class ScriptedDrafting(Drafting):
    """Asks the test before each step, as the policy would be asked if drafts always paid; learns as ever."""

    script: Script

    def wants(self, *_: Any) -> bool:
        return self.script.wants()

    def lengths(self, decode: IntColumn, *_: Any) -> Column | None:
        return _lengths(self, decode, self.script)


def _lengths(drafting: Drafting, decode: IntColumn, script: Script) -> Column | None:
    """Returns what the script decides, cut as the default is."""
    wanted = np.array(script.lengths(len(decode)), np.int32)
    lengths = np.minimum(wanted, most_drafts(drafting._table, decode, drafting._most))
    return lengths if lengths.any() else None


@contextmanager
def drafts_of(script: Script) -> Iterator[None]:
    """Lets the test decide the drafts of all runners, also of a simulation's."""

    def lengths(drafting: Drafting, decode: IntColumn, *_: Any) -> Column | None:
        return _lengths(drafting, decode, script)

    with mock.patch.multiple(Drafting, wants=lambda *_: script.wants(), lengths=lengths):
        yield


def follow_script(scheduler: Scheduler, script: Script) -> None:
    """Lets the test decide the drafts of the runner's steps, if it drafts."""
    drafting = scheduler.drafting
    if drafting.max_drafts and not isinstance(drafting, ScriptedDrafting):
        drafting.__class__ = ScriptedDrafting
        drafting.script = script  # type: ignore[attr-defined]
