"""Streams that decode beside long prompts: the figures, and a run of the hash backend."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.gpu_serving.client import ClientRecord
from bench.tensor_parallel import roles
from roster_protos import admin_pb2
from tests.support.thoroughness import FULL

MS = 1_000_000


def record(due: list[int], deltas: list[tuple[int, int]]) -> ClientRecord:
    """Returns a record of deltas, (request, milliseconds) each, in the order of their arrival."""
    requests, times = np.array(deltas, np.int64).reshape(-1, 2).T
    times, none = times * MS, np.zeros(0, np.int64)
    return ClientRecord(np.array(due) * MS, none, none, requests, times, np.ones_like(times), none)


def test_gaps_are_of_one_stream_and_within_the_time() -> None:
    found = record([0, 0], [(0, 10), (1, 12), (0, 15), (1, 32), (0, 40), (0, 41)])
    assert sorted(roles.gaps_within(found, 12 * MS, 40 * MS)) == [20.0, 25.0]  # 12 to 32, and 15 to 40
    assert len(roles.gaps_within(found, 41 * MS, 99 * MS)) == 0


def test_first_tokens_are_waited_for_since_they_were_due() -> None:
    assert roles.first_waits(record([5, 6], [(1, 20), (0, 30), (1, 21), (0, 31)])).tolist() == [25.0, 14.0]


def test_what_moved_between_two_states() -> None:
    before = admin_pb2.Moves(sequences=2, bytes={"memory": 10**9}, copy_s=1.0, pause_s=0.5)
    after = admin_pb2.Moves(sequences=6, failed=1, bytes={"memory": 4 * 10**9, "tcp": 0}, copy_s=1.5, pause_s=0.6)
    found = roles.moved(before, after)
    assert found["sequences"] == 4 and found["failed"] == 1 and found["bytes"] == {"memory": 3 * 10**9, "tcp": 0}
    assert found["gb_s"] == pytest.approx(6.0) and found["pause_ms"] == pytest.approx(25.0)
    nothing = roles.moved(after, after)
    assert nothing["gb_s"] is None and nothing["pause_ms"] is None


def test_no_figures_of_nothing() -> None:
    with pytest.raises(ValueError, match="choose a longer time"):
        roles.spread(np.zeros(0))


def test_a_ratio_is_to_one_alone() -> None:
    moves = roles.moved(admin_pb2.Moves(), admin_pb2.Moves())
    alone = {"system": "alone", "itl_ms": {"p50": 4.0, "p99": 5.0, "worst": 6.0}, "ttft_ms": None, "moves": moves}
    other = {**alone, "system": "roles", "itl_ms": {"p50": 5.0, "p99": 5.5, "worst": 9.0}}
    assert "(1.250 and 1.100 of alone)" in roles.sentence(other, alone)
    assert "of alone" not in roles.sentence(alone, alone)


@pytest.mark.skipif(not FULL, reason="starts six processes")
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    small = "--systems alone roles --streams 2 --prompt 64 --tokens 1900 --rate 2 --seconds 2 --shortest 100"
    more = f"--longest 400 --answer 40 --room 4 --device hash --output {out}"
    monkeypatch.setattr(sys, "argv", ["roles", *small.split(), *more.split()])
    roles.main()
    alone, divided = json.loads(out.read_text())["lines"]
    assert alone["arrivals"] == 0 and divided["arrivals"] == 4
    assert divided["moves"]["sequences"] >= 1 and divided["moves"]["bytes"]["tcp"] > 0
