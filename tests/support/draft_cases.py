"""Random steps for the kernels that draft, place, gather and accept tokens, against their definition in Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.interface.draft_launchers import DraftLaunchers, DraftRows
from runner_svc.sampling.sample_records import SAMPLE_RECORD
from tests.support.host_drafts import host_drafts

CONTEXT, BLOCK_SIZE, SLOTS, VOCAB = 70, 8, 9, 5
LONGEST, WINDOW = 4, 40
"""Settings of the n-gram drafter."""

MakeLaunchers = Callable[[Tensor, Tensor, Tensor], DraftLaunchers]
"""Makes launchers over a token buffer, its counters and block tables."""


class State:
    """A token buffer with counters, and launchers over it."""

    def __init__(self, tokens: Tensor, counters: Tensor, tables: Tensor, make: MakeLaunchers) -> None:
        self.tokens, self.counters = tokens, counters
        self.launchers = make(self.tokens, self.counters, tables)


def check_step(rng: random.Random, make: MakeLaunchers, device: torch.device, stream: int) -> None:
    """Compares a step: random drafts, lying counters and limits, logits that are not finite; and the state after it."""
    stride, numpy = rng.randint(1, 8), np.random.default_rng(rng.getrandbits(32))
    rows = _random_rows(rng, stride)
    places = len(rows) * stride
    proposals = torch.from_numpy(numpy.integers(-1, VOCAB + 1, (len(rows), max(1, stride - 1)), np.int32))
    draws = torch.from_numpy(numpy.integers(0, 2, places, np.int32))
    finite = torch.from_numpy((numpy.random(places) < 0.9).astype(np.uint8))
    packed = numpy.integers(0, 2**31, (len(rows), SAMPLE_RECORD.itemsize // 4), np.int32)
    typed = packed.reshape(-1).view(SAMPLE_RECORD)
    typed["slot"] = [row[0] for row in rows]
    typed["position"] = [-1 if row[1] < 0 else row[1] + row[2] for row in rows]
    typed["reserved"] = numpy.random(len(rows)) < 0.2
    results = [
        _step(state, _moved(_draft_rows(rows, stride), where), proposals, typed[:-1], draws, finite, stride, on)
        for state, where, on in zip(
            _states(rng, rows, make, device), (torch.device("cpu"), device), (0, stream), strict=True
        )
    ]
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0)


def check_proposals(rng: random.Random, make: MakeLaunchers, device: torch.device, stream: int) -> None:
    """Compares the n-gram drafter's proposals."""
    stride = rng.randint(1, 7)
    rows, proposed = _random_rows(rng, stride + 1), []
    for state in _states(rng, rows, make, device):
        where = state.tokens.device
        proposals = torch.full((len(rows), stride), -7, dtype=torch.int32, device=where)
        state.launchers.ngram(stream, _moved(_draft_rows(rows, stride + 1), where), proposals)
        proposed.append(proposals)
    torch.testing.assert_close(proposed[1].cpu(), proposed[0], rtol=0, atol=0)


def _states(
    rng: random.Random, rows: list[list[int]], make: MakeLaunchers, device: torch.device
) -> tuple[State, State]:
    """Returns equal states, the definition's first. Half of the rows have few tokens left up to their limits."""
    numpy = np.random.default_rng(rng.getrandbits(32))
    tokens = torch.from_numpy(numpy.integers(0, rng.choice([2, VOCAB]), (SLOTS + 1, CONTEXT), np.int32))
    counters = torch.from_numpy(numpy.integers(1, CONTEXT + 1, SLOTS + 1, np.int32))
    for slot, _, _, limit in rows:
        if rng.random() < 0.5:
            counters[slot] = min(max(1, limit - rng.randint(-1, 3)), CONTEXT)
    counters[rng.randrange(SLOTS)] = rng.choice([-3, 0, CONTEXT, CONTEXT + 9])  # of a plan that lies
    tables = torch.from_numpy(numpy.integers(1, 99, (SLOTS + 1, -(-CONTEXT // BLOCK_SIZE)), np.int32))
    moved = State(tokens.to(device, copy=True), counters.to(device, copy=True), tables.to(device, copy=True), make)
    return State(tokens, counters, tables, _definition), moved


def _definition(tokens: Tensor, counters: Tensor, tables: Tensor) -> DraftLaunchers:
    return host_drafts(tokens, counters, tables, BLOCK_SIZE, VOCAB, LONGEST, WINDOW)


def _random_rows(rng: random.Random, stride: int) -> list[list[int]]:
    """Returns slot, start, count and limit of each row, padding included."""
    rows = []
    for slot in rng.sample(range(SLOTS), 6):
        start = rng.choice([-1, -1, -1, rng.randrange(CONTEXT - stride)])
        rows.append([slot, start, rng.randint(1, stride), rng.choice([CONTEXT - 1, rng.randint(1, CONTEXT + 20)])])
    return [*rows, [SLOTS, 0, 0, 0]]


def _draft_rows(rows: list[list[int]], stride: int) -> DraftRows:
    slots, starts, counts, limits = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    offsets = torch.arange(len(rows) + 1, dtype=torch.int32) * stride
    firsts, present, drafted = torch.full((3, len(rows)), -7, dtype=torch.int32)
    return DraftRows(slots, starts, counts, limits, offsets, firsts, present, drafted)


def _moved(rows: DraftRows, device: torch.device) -> DraftRows:
    return DraftRows(**{field.name: getattr(rows, field.name).to(device, copy=True) for field in fields(DraftRows)})


def _step(
    state: State,
    rows: DraftRows,
    proposals: Tensor,
    typed: NDArray[np.void],
    draws: Tensor,
    finite: Tensor,
    stride: int,
    stream: int,
) -> list[Tensor]:
    """Returns all that the launchers of a step fill."""
    launchers, real, device = state.launchers, len(typed), state.tokens.device
    launchers.place(stream, rows, proposals.to(device) if stride > 1 else None)
    inputs = torch.full((3, len(rows.slots) * stride + 5), -7, dtype=torch.int32, device=device)
    launchers.gather(stream, rows, *inputs)
    words = real * stride * SAMPLE_RECORD.itemsize // 4 + 20
    expanded = torch.full((words,), -7, dtype=torch.int32, device=device)
    sampled = torch.arange(real, dtype=torch.int32, device=device)
    records = torch.from_numpy(typed.view(np.int32).copy()).to(device)
    launchers.expand(stream, records, sampled, rows, expanded, stride)
    outcomes = torch.full((real,), -7, dtype=torch.int32, device=device)
    launchers.accept(stream, expanded, draws.to(device), finite.to(device), outcomes, stride)
    return [rows.firsts, rows.present, rows.drafted, inputs, expanded, outcomes, state.tokens, state.counters]
