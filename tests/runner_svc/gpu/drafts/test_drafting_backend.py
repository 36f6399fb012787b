"""The GPU backend that drafts, on the CPU: streams equal those without drafts, whatever drafts and whatever happens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from runner_svc.gpu.backend import CudaBackend
from runner_svc.gpu.drafts.draft_options import DraftOptions
from tests.support.host_backend import host_backend
from tests.support.host_device import HostDevice
from tests.support.model_drafting import ModelDraftingDriver, Prophet, mixed_drafts
from tests.support.thoroughness import count
from tests.support.tiny_models import make_tiny_model

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny")


def backend(
    folder: Path, drafts: DraftOptions | None = None, max_step_tokens: int = 160, device: HostDevice | None = None
) -> CudaBackend:
    made = host_backend(
        folder,
        num_slots=5,
        block_size=BLOCK_SIZE,
        max_step_tokens=max_step_tokens,
        num_blocks=60,
        drafts=drafts,
        device=device,
    )
    made.cache.data.fill_(torch.nan)  # tails, and what no step has written
    return made


@pytest.mark.parametrize("run", range(count(40, in_ci=2)))
def test_streams_equal_those_without_drafts(folder: Path, run: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    prophet = Prophet(dice, wrong=dice.choice([0.0, 0.3]))
    device = HostDevice(mixed_graphs=dice.random() < 0.5)
    drafting = backend(folder, mixed_drafts(dice, prophet, dice.randint(2, 7)), device=device)
    driver = ModelDraftingDriver(drafting, backend(folder), prophet, dice, requests=8)
    driver.run()
    assert driver.drafted > 10 and driver.accepted > 3, "hardly any draft was tried"
    assert device.replays > 0
