"""Runs of several tokens per result in the slot table, whose rows of recent tokens they may fill in mid-run."""

from __future__ import annotations

import random

import numpy as np

from roster_protos import engine_pb2
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.plan.slot_table import RECENT_RESULTS, SlotTable, run_of


def test_logs_hold_every_token_in_order() -> None:
    rng, table = random.Random(1), SlotTable(5)
    sequences: dict[int, Sequence] = {}
    expected: dict[int, list[int]] = {}
    for result in range(6 * RECENT_RESULTS):
        if table.free and rng.random() < 0.3:
            submit = engine_pb2.Submit(prompt=pack([1, 2]), max_tokens=10**6, n=1)
            (sequence,) = build_request(submit, b"", result, 0.0).sequences
            slot = table.occupy(sequence, 0, 8, 0)
            sequences[slot], expected[slot] = sequence, [1, 2]
        slots = [slot for slot in sequences if rng.random() < 0.97]
        if not slots:
            continue
        longest = 200 if result % 32 == 0 else 3  # more than the table has had rows for
        runs = [[rng.randrange(100) for _ in range(rng.choice([1, 3, 3, 3, 3, 3, longest]))] for _ in slots]
        for slot, run in zip(slots, runs, strict=True):
            expected[slot] += run
        columns = [
            np.array(column, np.int32)
            for column in ([len(run) for run in runs], [token for run in runs for token in run])
        ]
        lengths = np.array([len(expected[slot]) for slot in slots], np.int32)
        if columns[0].max() == 1 and rng.random() < 0.5:
            table.append(np.array(slots), columns[1], lengths)
        else:
            firsts = np.cumsum(columns[0], dtype=np.int32) - columns[0]
            table.append_runs(np.array(slots), columns[1], columns[0], firsts, lengths)
        slot = rng.choice(slots)
        if rng.random() < 0.1:
            table.vacate(slot)
            assert sequences.pop(slot).log.tolist() == expected[slot]
        elif rng.random() < 0.1:
            table.settle(slot)
            assert sequences[slot].log.tolist() == expected[slot]


def test_only_slots_that_follow_one_another_become_a_slice() -> None:
    assert run_of(np.array([3, 4, 5])) == slice(3, 6)
    for others in ([3, 5, 4], [3, 5], [0, 5, 2], [4000, 4095, 4096]):
        slots = np.array(others)
        assert run_of(slots) is slots
