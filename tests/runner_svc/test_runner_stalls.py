"""A runner and its link leave nothing to the garbage collector, whose pauses would stop every stream."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from runner_svc.backend import Backend
from runner_svc.cuda_backend import CudaBackend, CudaSizes
from runner_svc.hash_model import HashBackend
from runner_svc.model.config import ModelConfig
from runner_svc.model.description import describe_model, read_json
from runner_svc.model.weights import load_weights
from runner_svc.torch_backend import TorchBackend
from tests.support.garbage import circles_left_by, in_own_process
from tests.support.host_device import HostDevice, HostLaunchers
from tests.support.linked_runner import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, linked_runner
from tests.support.tiny_models import make_tiny_model

MAX_STEP_TOKENS = 64


def no_progress(what: str, share: float) -> None:
    """Nobody looks."""


def hash_backend(folder: Path) -> HashBackend:
    return HashBackend(
        num_slots=NUM_SLOTS, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_step_tokens=MAX_STEP_TOKENS
    )


def torch_backend(folder: Path) -> TorchBackend:
    return TorchBackend.load(
        str(make_tiny_model("llama", folder / "tiny")),
        cache_folder=folder / "unused",
        progress=no_progress,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_slots=NUM_SLOTS,
        max_step_tokens=MAX_STEP_TOKENS,
    )


def cuda_backend(folder: Path) -> CudaBackend:
    """With launchers for the CPU: all but the kernels is what serves."""
    model = make_tiny_model("llama", folder / "tiny")
    config = ModelConfig.from_hugging_face(read_json(model / "config.json"))
    return CudaBackend(
        describe_model("tiny", model, config, "0"),
        config,
        load_weights(model, config, torch.float32, torch.device("cpu"), no_progress),
        HostLaunchers(config),
        HostDevice(),
        CudaSizes(
            num_slots=NUM_SLOTS,
            block_size=BLOCK_SIZE,
            max_step_tokens=MAX_STEP_TOKENS,
            context_length=config.context_length,
            num_blocks=NUM_BLOCKS,
        ),
        no_progress,
    )


BACKENDS = {"hash": hash_backend, "torch": torch_backend, "cuda": cuda_backend}


def circles_of(name: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        backend: Backend = BACKENDS[name](Path(folder))
        with linked_runner(backend) as runner:
            runner.generations(2)  # what is made once is made
            return circles_left_by(lambda: runner.generations(3))


@pytest.mark.parametrize("name", BACKENDS)
def test_plans_leave_no_circles(name: str) -> None:
    assert in_own_process(f"circles_of({name!r})", __name__) == "0"
