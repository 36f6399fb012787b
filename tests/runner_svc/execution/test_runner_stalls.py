"""A runner and its link create no reference cycles, because collector pauses would stop every stream."""

from __future__ import annotations

import tempfile
from pathlib import Path

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.gpu.backend import CudaBackend
from runner_svc.interface.backend import Backend
from tests.support.fork_server import Kind
from tests.support.garbage import circles_left_by, in_forked_process
from tests.support.host_backend import host_backend, no_progress
from tests.support.linked_runner import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, linked_runner
from tests.support.tiny_models import make_tiny_model

MAX_STEP_TOKENS = 64


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
    """The CUDA backend with launchers for the CPU: everything but the kernels is the product's code."""
    return host_backend(
        make_tiny_model("llama", folder / "tiny"),
        num_slots=NUM_SLOTS,
        block_size=BLOCK_SIZE,
        max_step_tokens=MAX_STEP_TOKENS,
        num_blocks=NUM_BLOCKS,
    )


BACKENDS = {"hash": hash_backend, "torch": torch_backend, "cuda": cuda_backend}


def circles_of(name: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        backend: Backend = BACKENDS[name](Path(folder))
        with linked_runner(backend) as runner:
            runner.generations(2)  # warm-up, for objects that are created once
            return circles_left_by(lambda: runner.generations(3))


def test_plans_leave_no_reference_cycles() -> None:
    found = in_forked_process("[circles_of(name) for name in BACKENDS]", __name__, Kind.TORCH)
    assert found == str([0] * len(BACKENDS))
