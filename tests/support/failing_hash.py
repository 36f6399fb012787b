"""The hash backend with logits that are not finite where the text says so, so that a text fails wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.interface.step import StepBatch
from tests.support.drafters import LateHash

FATAL = (20, 21, 22)
"""Tokens behind which no logits are finite."""


class FailingHash(HashBackend):
    """The logits that follow a token of `FATAL` are not finite, those behind a wrong draft of it included."""

    def _finite(self, batch: StepBatch, rows: NDArray[np.intp], positions: NDArray[np.integer]) -> NDArray[np.bool_]:
        lasts = np.cumsum(batch.counts)[rows] - 1 - (batch.ends[rows] - positions)
        return ~np.isin(batch.tokens[lasts], FATAL)


class LateFailingHash(FailingHash, LateHash):
    """The same as a backend that overlaps."""


def failure_of(before: Sequence[int], generated: Sequence[int]) -> int | None:
    """Returns the index of the token of `generated` that can't be drawn, the first behind one of `FATAL`; None if all
    can. `before`: the tokens before them."""
    lasts = [before[-1], *generated[:-1]]
    return next((index for index, token in enumerate(lasts) if token in FATAL), None)
