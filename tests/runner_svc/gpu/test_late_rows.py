"""The cases of `tests/gpu/test_masked_rows.py` with the host's kernels: the CUDA backend on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from runner_svc.batch.batch_state import BatchState
from runner_svc.gpu.drafts.draft_options import DraftOptions
from tests.support.host_backend import host_backend
from tests.support.late_rows import LateRows, differences
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(params=[None, DraftOptions()], ids=["plain", "drafting"])
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> LateRows:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model("llama", tmp_path / "tiny", rng.randrange(1000))
    backend = host_backend(folder, num_slots=4, block_size=8, max_step_tokens=40, num_blocks=20, drafts=request.param)
    return LateRows(backend, rng, lambda: None)


@pytest.mark.parametrize("checked", [True, False])
def test_new_sequences_compute_their_own_prompts(
    rows: LateRows, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checked:
        monkeypatch.setattr(BatchState, "outlived", lambda self, applied, rows: np.zeros(len(rows), np.bool_))
    expected = rows.undisturbed()
    errors = differences(rows.disturbed(), expected)
    print(f"errors {errors} sigma")
    assert rows.foreign_tokens() == (0 if checked else len(rows.slots))
    assert errors.max() < 0.001 if checked else errors.max() > 0.15


def test_penalties_count_the_tokens_of_the_sequence(rows: LateRows) -> None:
    assert differences(rows.penalised(leaves=True), rows.penalised(leaves=False)).max() < 0.001
