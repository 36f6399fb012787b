"""Killed ranks: what is read from the services' lines, and the streams' pause."""

from __future__ import annotations

import numpy as np

from bench.gpu_serving.client import ClientRecord
from bench.tensor_parallel.killed import RunnerLines, pause_at
from roster_client.serve.stack import RUNNER, SCHEDULER

MS = 1_000_000


def test_lines_say_which_process_a_rank_is_and_when_the_group_has_formed() -> None:
    lines = RunnerLines()
    lines(RUNNER, "2026-11-30T20:29:24.66Z [info     ] started a rank                 pid=24695 rank=1")
    lines(RUNNER, "2026-11-30T20:29:24.66Z [info     ] started a rank                 pid=24694 rank=0")
    lines(RUNNER, "2026-11-30T20:29:29.62Z [info     ] ready                          blocks=1024 epoch=1 ranks=2")
    lines(SCHEDULER, "2026-11-30T20:29:29.63Z [info     ] ready                          ")
    assert lines.pids == {0: 24694, 1: 24695} and lines.formed == 1
    lines(RUNNER, "2026-11-30T20:29:34.66Z [warning  ] a rank is lost, and starts again pid=24695 rank=1")
    lines(RUNNER, "2026-11-30T20:29:34.67Z [info     ] started a rank                 pid=24700 rank=1")
    assert lines.pids == {0: 24694, 1: 24700} and lines.formed == 1


def test_a_pause_is_the_longest_gap_of_all_streams_around_the_kill() -> None:
    times = np.array([0, 900, 910, 920, 4920, 4930, 9930]) * MS  # 900 ms before the kill do not count
    none = np.zeros(0, np.int64)
    record = ClientRecord(none, none, none, np.zeros_like(times), times, np.ones_like(times), none)
    assert pause_at(record, 915 * MS) == 5.0
    assert np.isnan(pause_at(record, 9931 * MS))
