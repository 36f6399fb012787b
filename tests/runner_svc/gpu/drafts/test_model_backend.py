"""The GPU backend with a draft model, on the CPU: exact streams, and right drafts where the model is the target."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.drafts import model_backend
from runner_svc.gpu.drafts.draft_options import DraftOptions
from runner_svc.gpu.drafts.model_backend import ModelDraftingCudaBackend
from tests.support.drafters import Prophet
from tests.support.host_backend import host_backend
from tests.support.model_drafting import ModelDraftingDriver
from tests.support.thoroughness import choice, count
from tests.support.tiny_models import NUM_TOKENS, make_tiny_model

SIZES: dict[str, Any] = {"num_slots": 5, "block_size": 8, "max_step_tokens": 160, "num_blocks": 60}


def backends(target: Path, draft: Path, most: int) -> tuple[ModelDraftingCudaBackend, CudaBackend]:
    """Returns the backend with the draft model, and one without drafts."""
    drafting = host_backend(target, draft_folder=draft, drafts=DraftOptions("", most), **SIZES)
    assert isinstance(drafting, ModelDraftingCudaBackend)
    plain = host_backend(target, **SIZES)
    for cache in (drafting.cache, drafting._steps.draft.cache, plain.cache):
        cache.data.fill_(torch.nan)  # tails, and what no step has written
    return drafting, plain


@pytest.mark.parametrize("kind", choice(["itself", "another", "fewer ids", "more ids"], in_ci=["itself"]))
@pytest.mark.parametrize("run", range(count(10, in_ci=1)))
def test_streams_equal_those_without_drafts(
    kind: str, run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(model_backend, "CATCH_UP", dice.choice([15, 1024]))
    target = make_tiny_model("llama", tmp_path / "target")
    draft = target
    if kind == "another":
        draft = make_tiny_model(dice.choice(["qwen3", "gemma2", "llama-dynamic"]), tmp_path / "draft")
    elif kind != "itself":
        more = -1 if kind == "fewer ids" else 8
        draft = make_tiny_model("llama", tmp_path / "draft", vocab_size=NUM_TOKENS + more)
    drafting, plain = backends(target, draft, dice.randint(1, 7))
    requests = count(8, in_ci=3)
    driver = ModelDraftingDriver(drafting, plain, Prophet(dice, NUM_TOKENS, 0.0), dice, requests)
    driver.run()
    print(f"{driver.drafted} drafted, {driver.accepted} accepted")
    assert driver.drafted > 5 or requests < 8, "a few short requests may draft nothing"
    if kind == "itself":
        assert driver.accepted >= 0.95 * driver.drafted
