"""A draft model on a GPU: streams against those of a backend without drafts, and right drafts from right KV."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.model_backend import ModelDraftingCudaBackend
from tests.gpu.test_drafts import Drafted, near_ties
from tests.support.gpu_backends import FAMILIES, load  # imports CuPy


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("family", "other"), [("llama", "llama"), ("qwen3", "qwen3"), ("llama", "gemma3")])
def test_streams_are_those_without_drafts_up_to_near_ties(
    family: str, other: str, temperature: float, tmp_path: Path
) -> None:
    """Two plans in flight, random numbers of drafts. The same model drafts what it draws, but for near ties."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder = make_tiny_model(family, tmp_path / "tiny", 7, torch.bfloat16, **FAMILIES[family])
    draft = folder
    if other != family:
        draft = make_tiny_model(other, tmp_path / "draft", 8, torch.bfloat16, **FAMILIES[other])
    prompts = [[rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 15))] for _ in range(8)]
    plain = Drafted(load(folder, num_slots=8), prompts, temperature)
    plain.run(rng, 0)
    backend = load(folder, num_slots=8, drafts=DraftOptions("", 7), draft_folder=draft)
    assert isinstance(backend, ModelDraftingCudaBackend)
    backend._steps.draft.cache.data.view(torch.uint8).fill_(0xFF)  # NaN
    drafted = Drafted(backend, prompts, temperature)
    drafted.run(rng, 7)
    ties = near_ties(drafted, plain, temperature)
    print(f"{family}, {other}, {temperature}: ties {ties} of 8, {drafted.drafted} drafted, {drafted.accepted} accepted")
    assert ties <= 4 and drafted.drafted > 60
    if other == family:
        assert drafted.accepted >= 0.9 * drafted.drafted
    assert len(backend.verify_graphs.captured) > 0


def test_the_pool_leaves_room_for_both_models(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny", 7, torch.bfloat16, **FAMILIES["llama"])
    alone = load(folder, num_blocks=None, num_slots=4, drafts=DraftOptions("ngram", 3))
    blocks = alone.num_blocks
    del alone
    torch.cuda.empty_cache()
    both = load(folder, num_blocks=None, num_slots=4, drafts=DraftOptions("", 3), draft_folder=folder)
    print(f"{blocks} blocks alone, {both.num_blocks} with a draft model as large")
    assert 0.4 * blocks < both.num_blocks < 0.52 * blocks
