"""The rule of acceptance agrees with its definition, one position after the other."""

from __future__ import annotations

import numpy as np

from roster_protos import plan_pb2
from runner_svc.drafting.accept import accept


def kept(draws: list[int], finite: list[bool], drafts: list[int]) -> int:
    """The definition: the number of draws that one row keeps."""
    for index, (draw, good) in enumerate(zip(draws, finite, strict=True)):
        if not good:
            return index
        if index == len(drafts) or drafts[index] != draw:
            return index + 1
    raise AssertionError("there is one draw more than drafts")


def test_random_rows_agree_with_the_definition() -> None:
    rng = np.random.default_rng()
    for most in (0, 1, 2, 7):
        draws = rng.integers(0, 2, (300, 1 + most), np.int32)
        finite = rng.random(draws.shape) < 0.85
        drafts = np.where(rng.random((300, most)) < 0.7, draws[:, :most], rng.integers(0, 2, (300, most), np.int32))
        lengths = rng.integers(0, 1 + most, 300)
        drafts[np.arange(most) >= lengths[:, None]] = -1
        beyond = np.arange(1 + most) > lengths[:, None]
        draws[beyond] = rng.choice([-1, 0, 5], beyond.sum())  # behind a row's last position, anything
        counts, statuses = accept(draws, finite, drafts)
        rows = zip(draws.tolist(), finite.tolist(), drafts.tolist(), lengths.tolist(), strict=True)
        expected = [kept(a[: n + 1], b[: n + 1], c[:n]) for a, b, c, n in rows]
        assert counts.tolist() == expected and counts.dtype == statuses.dtype == np.uint8
        assert (statuses == np.where(counts == 0, plan_pb2.ROW_STATUS_NOT_FINITE, 0)).all()
