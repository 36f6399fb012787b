"""The backend that tests of real models run: `TESTED`, as ROSTER_TEST_DEVICE says (see `tested_device`).

It also says what the device allows: sizes of blocks and of models, and how close to float32 its tokens are. Where that
is the CPU, some tests run a part of what they try over the CUDA backend's host code as well: `TESTED_AND_HOST`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runner_svc.backends.torch_backend import TorchBackend
from runner_svc.gpu.backend import CudaBackend
from tests.support import thoroughness
from tests.support.host_backend import host_backend, no_progress
from tests.support.parity import BFLOAT16, FLOAT16, FLOAT32, Precision
from tests.support.tested_device import DEVICE
from tests.support.tiny_models import KERNEL_SIZES, make_tiny_model

KERNEL_BLOCK_SIZES = (16, 32)
HOST_SHARE = 2
"""Of what the CPU tries in CI, the host tries one in so many."""

ModelBackend = TorchBackend | CudaBackend


def _load_cpu(folder: Path, *, dtype: torch.dtype, **sizes: int) -> TorchBackend:
    return TorchBackend.load(str(folder), cache_folder=folder / "unused", progress=no_progress, **sizes)


def _load_cuda(folder: Path, **sizes: Any) -> CudaBackend:
    from tests.support.gpu_backends import load  # imports CuPy

    return load(folder, **sizes)


@dataclass(frozen=True, slots=True)
class TestedBackend:
    """A way to compute, and what tests must know of it."""

    __test__ = False  # pytest takes it for a test otherwise

    name: str
    loader: Callable[..., ModelBackend]
    """Takes the folder, the dtype, and sizes as `load`."""
    has_kernel_sizes: bool
    tiny: Precision
    """Tiny models are made of weights that this has, so that only arithmetic differs from float32."""
    smollm2: Precision
    """What SmolLM2 is served in, which its weights are rounded to."""
    share: int = 1
    """It tries one in so many of what tests would try."""

    def __str__(self) -> str:
        return self.name

    def count(self, full: int, *, in_ci: int) -> int:
        """How many to try."""
        return max(1, thoroughness.count(full, in_ci=in_ci) // self.share)

    def block_size(self, wanted: int) -> int:
        """The size of blocks that the device has for one that a test wants, in tokens."""
        if not self.has_kernel_sizes:
            return wanted
        return min(size for size in KERNEL_BLOCK_SIZES if size >= min(wanted, max(KERNEL_BLOCK_SIZES)))

    def make_model(self, family: str, folder: Path, seed: int = 0) -> Path:
        """A tiny model that the device can serve; skips the test where the kernels have no such sizes."""
        if not self.has_kernel_sizes:
            return make_tiny_model(family, folder, seed)
        if family not in KERNEL_SIZES:
            pytest.skip(f"KERNEL_SIZES has no sizes of {family} that the kernels have")
        return make_tiny_model(family, folder, seed, self.tiny.dtype, **KERNEL_SIZES[family])

    def load(
        self,
        folder: Path,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_step_tokens: int,
        precision: Precision | None = None,
    ) -> ModelBackend:
        """The model in `folder`, a tiny one unless `precision` is given; its cache holds NaN.

        Sizes are as the runner's settings of these names; `num_blocks` leaves room for other processes on a GPU.
        """
        backend = self.loader(
            folder,
            dtype=(precision or self.tiny).dtype,
            num_blocks=num_blocks,
            block_size=self.block_size(block_size),
            num_slots=num_slots,
            max_step_tokens=max_step_tokens,
        )
        poison(backend.cache.data)  # nothing may be read that was not written
        return backend


CPU = TestedBackend("cpu", _load_cpu, False, FLOAT32, FLOAT32)
HOST = TestedBackend("host", host_backend, True, FLOAT32, FLOAT32)
CUDA = TestedBackend("cuda", _load_cuda, True, FLOAT16, BFLOAT16)

TESTED = {"cpu": CPU, "host": HOST, "cuda": CUDA}[DEVICE]
"""The one that ROSTER_TEST_DEVICE asks for."""
TESTED_AND_HOST = (
    [CPU, TestedBackend("host", host_backend, True, FLOAT32, FLOAT32, HOST_SHARE)] if TESTED is CPU else [TESTED]
)
"""And in CI a part of the tests over the CUDA backend's host code."""


def reference(folder: Path, precision: Precision) -> Any:
    """transformers' model in float32 on the CPU, with the weights that a backend of this precision has."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in model.parameters():  # and not RoPE's frequencies, which are float32 everywhere
        parameter.data = parameter.data.to(precision.dtype).to(torch.float32)
    return model


def poison(cached: torch.Tensor) -> None:
    """Makes a part of a cache NaN, before the next step of its backend."""
    cached.fill_(torch.nan)
    synchronize(cached.device)


def synchronize(device: torch.device | str) -> None:
    """Waits for all that was launched on it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
