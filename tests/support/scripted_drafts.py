"""Drafts whose numbers a test decides, in place of the policy and its step-time model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scheduler_svc.drafting.draft_lengths import Drafting
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.plan.slot_table import IntColumn
from scheduler_svc.scheduler.scheduler import Scheduler

Choose = Callable[[int], Sequence[int]]
"""Maps the number of a step's rows to the number of drafts that each row is to have, which may be too many."""


def random_drafts(rng: random.Random) -> Choose:
    """Returns random numbers: none at all in every fifth step, and often more than a row may have."""

    def choose(rows: int) -> list[int]:
        if rng.random() < 0.2:
            return [0] * rows
        return [rng.choice((0, 9, rng.randint(0, 9))) for _ in range(rows)]

    return choose


class ScriptedDrafting(Drafting):
    """Asks the test before each step, as the policy would be asked if drafts always paid."""

    def __init__(self, scheduler: Scheduler, choose: Choose) -> None:
        self.max_drafts = scheduler.hello.max_drafts
        self._choose = choose

    def wants(self, *_: Any) -> bool:
        return True

    def lengths(self, decode: IntColumn, *_: Any) -> Column | None:
        lengths = np.array(self._choose(len(decode)), np.int32)
        return lengths if lengths.any() else None

    def applied(self, applied: AppliedResult) -> None:
        pass


def script(scheduler: Scheduler, choose: Choose) -> None:
    """Lets the test decide the drafts of the runner's steps, if it drafts."""
    if scheduler.drafting.max_drafts and not isinstance(scheduler.drafting, ScriptedDrafting):
        scheduler.drafting = ScriptedDrafting(scheduler, choose)
