"""The sources of the kernels that draft and accept tokens, emulated on a CPU, against their definition in Python."""

from __future__ import annotations

import random
import shutil
from functools import partial

import pytest
import torch
from torch import Tensor

from runner_svc.cuda.drafts import accept, gather, ngram, place, records
from runner_svc.interface.draft_launchers import DraftLaunchers
from tests.support.draft_cases import BLOCK_SIZE, LONGEST, VOCAB, WINDOW, check_proposals, check_step
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule
from tests.support.thoroughness import choice, count

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CPU = torch.device("cpu")


@pytest.fixture
def rng(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    for module in (accept, gather, ngram, place, records):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch="sm_80"))
        monkeypatch.setattr(module, "_THREADS", 32)  # the emulator's threads are slow
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def emulated(tokens: Tensor, counters: Tensor, tables: Tensor) -> DraftLaunchers:
    return DraftLaunchers(
        ngram=ngram.NgramDraft(tokens, counters, longest=LONGEST, window=WINDOW),
        place=place.PlaceDrafts(tokens, counters, VOCAB),
        gather=gather.GatherDrafted(tokens, tables, BLOCK_SIZE),
        expand=records.ExpandRecords(),
        accept=accept.AcceptDrafts(tokens, counters),
    )


def test_a_step_is_that_of_the_definition(rng: random.Random) -> None:
    for _ in range(count(200, in_ci=4)):
        check_step(rng, emulated, CPU, 0)


@pytest.mark.parametrize("steps", choice([100], in_ci=[]))  # compiling it takes a second
def test_proposals_are_those_of_the_definition(steps: int, rng: random.Random) -> None:
    for _ in range(steps):
        check_proposals(rng, emulated, CPU, 0)
