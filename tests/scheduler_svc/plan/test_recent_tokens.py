"""Tokens of results reach the logs of their sequences, in order, whatever mix of single tokens and runs comes."""

from __future__ import annotations

import random

import numpy as np

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.plan.slot_table import RECENT_RESULTS, SlotTable, run_of

SLOTS = 5


def sequence_of(number: int) -> Sequence:
    sampling = plan_pb2.Sampling(top_p=1, repetition_penalty=1)
    submit = engine_pb2.Submit(handle=number, prompt=pack([number]), n=1, max_tokens=10**6, sampling=sampling)
    return build_request(submit, b"", number + 1, 0.0).sequences[0]


def test_runs_and_single_tokens_reach_the_logs_in_order() -> None:
    rng, table = random.Random(4), SlotTable(SLOTS)
    expected: dict[int, list[int]] = {}  # by slot
    num_joined = 0
    for step in range(12 * RECENT_RESULTS):
        if len(expected) < SLOTS and rng.random() < 0.2:
            num_joined += 1
            expected[table.occupy(sequence_of(num_joined), 0, 0, 0)] = [num_joined]
        if expected and rng.random() < 0.05:
            slot = rng.choice(list(expected))
            sequence = table.at(slot)
            (table.vacate if rng.random() < 0.5 else table.settle)(slot)
            assert list(sequence.log) == expected[slot]
            if table.sequences[slot] is None:
                del expected[slot]
        slots = sorted(rng.sample(list(expected), rng.randint(0, len(expected))))
        longest = 1 if step % 3 else rng.choice((3, 8, 200))
        counts = np.array([rng.randint(1, longest) for _ in slots], np.int32)
        tokens = np.array([rng.randrange(100) for _ in range(int(counts.sum()))], np.int32)
        firsts, column = np.cumsum(counts, dtype=np.int32) - counts, np.array(slots, np.int64)
        for slot, first, count in zip(slots, firsts.tolist(), counts.tolist(), strict=True):
            expected[slot] += tokens[first : first + count].tolist()
        lengths = table.length[column] + counts
        if longest > 1:
            table.append_runs(column, tokens, counts, firsts, lengths)
        else:
            table.append(column, tokens, lengths)
        assert {slot: table.length[slot] for slot in expected} == {slot: len(log) for slot, log in expected.items()}
    for slot, log in expected.items():
        table.settle(slot)
        assert list(table.at(slot).log) == log


def test_only_slots_that_follow_one_another_become_a_slice() -> None:
    assert run_of(np.array([3, 4, 5])) == slice(3, 6)
    for others in ([3, 5, 4], [3, 5], [0, 5, 2], [4000, 4095, 4096]):
        slots = np.array(others)
        assert run_of(slots) is slots
