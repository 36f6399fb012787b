"""Random lengths of drafts in place of the scheduler's own decision, so that every step and row differs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

from scheduler_svc.drafting.draft_lengths import Drafting
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.plan.slot_table import IntColumn
from scheduler_svc.policy import Load, PolicyGuard

Lengths = Callable[[IntColumn], list[int] | None]
"""Returns how many tokens each of these slots drafts, or None if none does."""


@contextmanager
def drafts_of(lengths: Lengths, wants: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Decides the lengths of all drafts by this function. What it returns may be more than a row can draft.

    `wants`: whether the next step asks for them, and does not simply continue the last one.
    """

    def decide(
        self: Drafting, decode: IntColumn, last_plan: int, load: Callable[[], Load], policy: PolicyGuard
    ) -> Column | None:
        chosen = lengths(decode)
        return None if chosen is None else np.array(chosen, np.int32)

    with mock.patch.multiple(Drafting, wants=lambda *_: wants(), lengths=decide, applied=lambda *_: None):
        yield


def random_lengths(rng: random.Random, most: int) -> Lengths:
    """Returns lengths that are all 0 in every third step, and otherwise random for each row, at most `most` + 2."""

    def lengths(decode: IntColumn) -> list[int] | None:
        if rng.random() < 1 / 3:
            return None
        return [max(0, rng.randint(-1, most + 2)) for _ in decode]

    return lengths
