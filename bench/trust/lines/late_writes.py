"""Late samples: none is written to a slot that meanwhile has another sequence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import structlog
from numpy.typing import NDArray

from bench.trust.line import Line
from runner_svc.batch.batch_state import AppliedPlan, BatchState
from tests.scheduler_svc.failure.test_recovery_walks import walk

_MOST_UNCHECKED = 25
"""Walks without the check, one of which must be wrong: as many as the test suite runs with it."""


def run(quick: bool) -> Line:
    """Runs random walks with the check of slots' epochs before each late sample, and without it until one is wrong."""
    walks = 5 if quick else 300
    late = _Late()
    with _silence():
        with mock.patch.object(BatchState, "outlived", late.counted):
            wrong = sum(not _is_right(seed) for seed in range(1, walks + 1))
        with mock.patch.object(BatchState, "outlived", lambda state, applied, rows: np.zeros(len(rows), np.bool_)):
            first = next((seed for seed in range(1, _MOST_UNCHECKED + 1) if not _is_right(seed)), None)
    without = f"first wrong walk after {first} without" if first else f"none wrong in {_MOST_UNCHECKED} without"
    return Line(
        promise="a token sampled after its sequence has left the slot is in no other sequence's answer",
        figure=f"{wrong} of {walks} walks wrong with the check ({late.rows} late rows), {without}",
        bar=f"0 wrong with it, one within {_MOST_UNCHECKED} without",
        met=wrong == 0 and late.rows > 0 and first is not None,
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Suppresses the logs of the losses in walks."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


class _Late:
    """Counter of the rows that the check redirects."""

    def __init__(self) -> None:
        self.rows = 0
        check = BatchState.outlived

        def counted(state: BatchState, applied: AppliedPlan, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
            gone = check(state, applied, rows)
            self.rows += int(gone.sum())
            return gone

        self.counted = counted


def _is_right(seed: int) -> bool:
    """Returns whether each stream of the walk ends equal to its reference."""
    try:
        walk(seed)
    except AssertionError:
        return False
    return True
