"""Copies beside a model's steps as in `tests/gpu/test_copied_steps.py`, on the host's device; what drafters keep."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.model_backend import ModelDraftingCudaBackend
from tests.support.eagle_layers import random_layer, save_layer
from tests.support.host_backend import host_backend, no_progress
from tests.support.host_copies import check_prefix, check_steps
from tests.support.tiny_models import make_tiny_model

HIDDEN = 64


def backend_of(folder: Path, **options: object) -> CudaBackend:
    sizes = {"num_slots": 3, "block_size": 16, "max_step_tokens": 128, "num_blocks": 200}
    return host_backend(folder, **sizes, **options)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "tiny")


def test_steps_are_the_same_while_blocks_are_copied(folder: Path) -> None:
    check_steps(backend_of(folder), random.Random(1))


@pytest.mark.parametrize("fp8_cache", [False, True])
def test_a_prefix_that_went_out_and_came_back_decodes_alike(fp8_cache: bool, folder: Path) -> None:
    check_prefix(backend_of(folder, fp8_cache=fp8_cache), random.Random(2), poison=0x7F if fp8_cache else 0xFF)


def test_what_eagle_keeps_travels_with_the_blocks(folder: Path, tmp_path: Path) -> None:
    layer = save_layer(tmp_path / "layer", random_layer(False, hidden=HIDDEN), hidden_size=HIDDEN)
    backend = backend_of(folder, drafts=DraftOptions(f"eagle:{layer}", 3), eagle=layer)
    kept = backend._kept_by_block()
    assert len(kept) == 3 and {len(region) for region in kept[1:]} == {1, 2}
    copier = backend.host_copier(10, no_progress)
    assert copier.block_bytes == sum(each.numel() * each.element_size() // 201 for each in kept)


def test_a_draft_models_kv_of_loaded_blocks_is_forgotten(folder: Path) -> None:
    backend = backend_of(folder, drafts=DraftOptions(f"model:{folder}", 3), draft_folder=folder)
    assert isinstance(backend, ModelDraftingCudaBackend)
    marks = backend._progress.counters.marks
    marks[:] = True
    backend.forget_drafts(np.array([3, 5], np.int32))
    assert np.flatnonzero(~marks).tolist() == [3, 5]
