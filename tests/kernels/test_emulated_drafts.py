"""The sources of the kernels that draft and accept tokens, emulated on a CPU, against their definition in Python."""

from __future__ import annotations

import random
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from runner_svc.cuda.drafts import accept, gather, ngram, place, records
from runner_svc.interface.draft_launchers import DraftLaunchers, DraftRows
from runner_svc.sampling.sample_records import SAMPLE_RECORD
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule
from tests.support.host_drafts import host_drafts
from tests.support.thoroughness import count

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CONTEXT, BLOCK_SIZE, SLOTS, VOCAB = 70, 8, 9, 5
LONGEST, WINDOW = 4, 40


@pytest.fixture
def rng(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    for module in (accept, gather, ngram, place, records):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch="sm_80"))
        monkeypatch.setattr(module, "_THREADS", 32)  # the emulator's threads are slow
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


class State:
    """A token buffer with counters and tables, and launchers over it."""

    def __init__(self, tokens: Tensor, counters: Tensor, tables: Tensor, *, emulated: bool) -> None:
        self.tokens, self.counters = tokens.clone(), counters.clone()
        make = emulated_drafts if emulated else host_drafts
        self.launchers = make(self.tokens, self.counters, tables, BLOCK_SIZE, VOCAB, LONGEST, WINDOW)


def emulated_drafts(
    tokens: Tensor, counters: Tensor, tables: Tensor, block_size: int, vocab: int, longest: int, window: int
) -> DraftLaunchers:
    return DraftLaunchers(
        ngram=ngram.NgramDraft(tokens, counters, longest=longest, window=window),
        place=place.PlaceDrafts(tokens, counters, vocab),
        gather=gather.GatherDrafted(tokens, tables, block_size),
        expand=records.ExpandRecords(),
        accept=accept.AcceptDrafts(tokens, counters),
    )


def states(rng: random.Random) -> tuple[State, State]:
    numpy = np.random.default_rng(rng.getrandbits(32))
    tokens = torch.from_numpy(numpy.integers(0, rng.choice([2, VOCAB]), (SLOTS + 1, CONTEXT), np.int32))
    counters = torch.from_numpy(numpy.integers(1, CONTEXT + 1, SLOTS + 1, np.int32))
    counters[rng.randrange(SLOTS)] = rng.choice([-3, 0, CONTEXT, CONTEXT + 9])  # of a plan that lies
    tables = torch.from_numpy(numpy.integers(1, 99, (SLOTS + 1, -(-CONTEXT // BLOCK_SIZE)), np.int32))
    return State(tokens, counters, tables, emulated=False), State(tokens, counters, tables, emulated=True)


def random_rows(rng: random.Random, stride: int) -> list[list[int]]:
    """Slot, start, count and limit of each row, padding included."""
    rows = []
    for slot in rng.sample(range(SLOTS), 6):
        start = rng.choice([-1, -1, -1, rng.randrange(CONTEXT - stride)])
        rows.append([slot, start, rng.randint(1, stride), rng.choice([CONTEXT - 1, rng.randint(1, CONTEXT + 20)])])
    return [*rows, [SLOTS, 0, 0, 0]]


def on_device(rows: list[list[int]], stride: int) -> DraftRows:
    slots, starts, counts, limits = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    offsets = torch.arange(len(rows) + 1, dtype=torch.int32) * stride
    firsts, present, drafted = torch.full((3, len(rows)), -7, dtype=torch.int32)
    return DraftRows(slots, starts, counts, limits, offsets, firsts, present, drafted)


def test_a_step_is_that_of_the_definition(rng: random.Random) -> None:
    """Random drafts, lying counters and limits, logits that are not finite; the rows' outputs and the state after."""
    for _ in range(count(200, in_ci=10)):
        stride = rng.randint(1, 8)
        rows, numpy = random_rows(rng, stride), np.random.default_rng(rng.getrandbits(32))
        places = len(rows) * stride
        proposals = torch.from_numpy(numpy.integers(-1, VOCAB + 1, (len(rows), max(1, stride - 1)), np.int32))
        draws = torch.from_numpy(numpy.integers(0, 2, places, np.int32))
        finite = torch.from_numpy((numpy.random(places) < 0.9).astype(np.uint8))
        packed = numpy.integers(0, 2**31, (len(rows), SAMPLE_RECORD.itemsize // 4), np.int32)
        typed = packed.reshape(-1).view(SAMPLE_RECORD)
        typed["slot"] = [row[0] for row in rows]
        typed["position"] = [-1 if row[1] < 0 else row[1] + row[2] for row in rows]
        typed["reserved"] = numpy.random(len(rows)) < 0.2
        ran = [
            _run(state, on_device(rows, stride), proposals, typed[:-1], draws, finite, stride) for state in states(rng)
        ]
        for ours, expected in zip(ran[1], ran[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def _run(
    state: State,
    rows: DraftRows,
    proposals: Tensor,
    typed: np.ndarray,
    draws: Tensor,
    finite: Tensor,
    stride: int,
) -> list[Tensor]:
    launchers, real = state.launchers, len(typed)
    launchers.place(0, rows, proposals if stride > 1 else None)
    inputs = torch.full((3, len(rows.slots) * stride + 5), -7, dtype=torch.int32)
    launchers.gather(0, rows, *inputs)
    expanded = torch.full((real * stride * SAMPLE_RECORD.itemsize // 4 + 20,), -7, dtype=torch.int32)
    sampled = torch.arange(real, dtype=torch.int32)
    launchers.expand(0, torch.from_numpy(typed.view(np.int32).copy()), sampled, rows, expanded, stride)
    outcomes = torch.full((real,), -7, dtype=torch.int32)
    launchers.accept(0, expanded, draws, finite, outcomes, stride)
    return [rows.firsts, rows.present, rows.drafted, inputs, expanded, outcomes, state.tokens, state.counters]


def test_proposals_are_those_of_the_definition(rng: random.Random) -> None:
    for _ in range(count(100, in_ci=10)):
        stride = rng.randint(1, 7)
        rows, proposed = random_rows(rng, stride + 1), []
        for state in states(rng):
            proposals = torch.full((len(rows), stride), -7, dtype=torch.int32)
            state.launchers.ngram(0, on_device(rows, stride + 1), proposals)
            proposed.append(proposals)
        torch.testing.assert_close(proposed[1], proposed[0], rtol=0, atol=0)
