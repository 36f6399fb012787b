"""The kernels that draft and accept tokens, on a GPU, against their definition in Python."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.support.draft_cases import BLOCK_SIZE, LONGEST, VOCAB, WINDOW, check_proposals, check_step

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.drafts.accept import AcceptDrafts  # imports CuPy
from runner_svc.cuda.drafts.gather import GatherDrafted
from runner_svc.cuda.drafts.ngram import NgramDraft
from runner_svc.cuda.drafts.place import PlaceDrafts
from runner_svc.cuda.drafts.records import ExpandRecords
from runner_svc.interface.draft_launchers import DraftLaunchers


def launchers(tokens: Tensor, counters: Tensor, tables: Tensor) -> DraftLaunchers:
    return DraftLaunchers(
        ngram=NgramDraft(tokens, counters, longest=LONGEST, window=WINDOW, overlap=True),
        place=PlaceDrafts(tokens, counters, VOCAB, overlap=True),
        gather=GatherDrafted(tokens, tables, BLOCK_SIZE, overlap=True),
        expand=ExpandRecords(),
        accept=AcceptDrafts(tokens, counters),
    )


def test_the_kernels_are_those_of_the_definition() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    device, stream = torch.device("cuda"), torch.cuda.current_stream().cuda_stream
    for _ in range(100):
        check_step(rng, launchers, device, stream)
        check_proposals(rng, launchers, device, stream)
