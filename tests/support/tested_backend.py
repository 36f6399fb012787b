"""The backend used by tests of real models: `TESTED`, chosen by ROSTER_TEST_DEVICE (see `tested_device`).

It also states the device's limits: sizes of blocks and models, and how close to float32 its tokens are. On the CPU,
some tests also run part of their cases on the CUDA backend's host code: `TESTED_AND_HOST`.
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
from tests.support.deterministic_cpu import skip_where_refused
from tests.support.exact_parity import ExactParity
from tests.support.host_backend import host_backend, no_progress
from tests.support.parity import BFLOAT16, EXACT, FLOAT16, FLOAT32, Parity, Precision
from tests.support.ranked_backend import RankedBackend
from tests.support.tested_device import DEVICE
from tests.support.tiny_models import KERNEL_SIZES, make_tiny_model

KERNEL_BLOCK_SIZES = (16, 32)
HOST_SHARE = 2
"""In CI the host runs one in this many of the CPU's cases."""

ModelBackend = TorchBackend | CudaBackend | RankedBackend


def _load_cpu(folder: Path, *, dtype: torch.dtype, **sizes: Any) -> TorchBackend:
    return TorchBackend.load(str(folder), cache_folder=folder / "unused", progress=no_progress, **sizes)


def _load_deterministic(folder: Path, *, dtype: torch.dtype, **sizes: Any) -> TorchBackend:
    skip_where_refused()
    return _load_cpu(folder, dtype=dtype, deterministic=True, **sizes)


def _load_ranks(folder: Path, *, dtype: torch.dtype, **sizes: Any) -> RankedBackend:
    return RankedBackend.load(folder, 2, **sizes)


def _load_transformers(folder: Path, *, dtype: torch.dtype, **sizes: Any) -> TorchBackend:
    return _load_cpu(folder, dtype=dtype, decoder="transformers", **sizes)


def _load_cuda(folder: Path, **sizes: Any) -> CudaBackend:
    from tests.support.gpu_backends import load  # imports CuPy

    return load(folder, **sizes)


@dataclass(frozen=True, slots=True)
class TestedBackend:
    """A backend, with the properties that tests depend on."""

    __test__ = False  # pytest would collect the class otherwise

    name: str
    loader: Callable[..., ModelBackend]
    """Takes the folder, the dtype, and sizes as `load` does."""
    has_kernel_sizes: bool
    tiny: Precision
    """Precision for tiny models: their weights are exact in its dtype, so that only arithmetic differs from float32."""
    smollm2: Precision
    """Precision for SmolLM2: its dtype is the one that SmolLM2 is served in and its weights are rounded to."""
    share: int = 1
    """It runs one in this many of a test's cases."""
    refused: tuple[str, ...] = ()
    """Families of tiny models that it refuses."""

    def __str__(self) -> str:
        return self.name

    def count(self, full: int, *, in_ci: int) -> int:
        """Returns the number of cases to run."""
        return max(1, thoroughness.count(full, in_ci=in_ci) // self.share)

    def block_size(self, wanted: int) -> int:
        """Returns the device's smallest block size of at least `wanted` tokens, or its largest."""
        if not self.has_kernel_sizes:
            return wanted
        return min(size for size in KERNEL_BLOCK_SIZES if size >= min(wanted, max(KERNEL_BLOCK_SIZES)))

    def make_model(self, family: str, folder: Path, seed: int = 0) -> Path:
        """Returns a tiny model that the device can serve; skips the test if there is none."""
        if family in self.refused:
            pytest.skip(f"{self.name} refuses {family}")
        if not self.has_kernel_sizes:
            return make_tiny_model(family, folder, seed)
        if family not in KERNEL_SIZES:
            pytest.skip(f"KERNEL_SIZES has no sizes of {family} that the kernels support")
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
        """Returns the model in `folder`, loaded with a cache full of NaN; a tiny model unless `precision` is given.

        Sizes are those of the runner's settings of these names; `num_blocks` leaves memory for other processes on a
        GPU.
        """
        backend = self.loader(
            folder,
            dtype=(precision or self.tiny).dtype,
            num_blocks=num_blocks,
            block_size=self.block_size(block_size),
            num_slots=num_slots,
            max_step_tokens=max_step_tokens,
        )
        poison(backend.cache.data)  # so that reading an unwritten position shows
        return backend


CPU = TestedBackend("cpu", _load_cpu, False, FLOAT32, FLOAT32)
HOST = TestedBackend("host", host_backend, True, FLOAT32, FLOAT32)
DETERMINISTIC = TestedBackend("deterministic", _load_deterministic, False, EXACT, EXACT, HOST_SHARE, ("llama-dynamic",))
"""The CPU's with `deterministic`: two runs are compared without near ties. See `parity_of`."""
RANKS = TestedBackend("ranks", _load_ranks, False, FLOAT32, FLOAT32, HOST_SHARE, ("llama-head-dim",))
"""The CPU's, divided among two ranks, which are threads."""
CUDA = TestedBackend("cuda", _load_cuda, True, FLOAT16, BFLOAT16)

TESTED = {"cpu": CPU, "host": HOST, "cuda": CUDA}[DEVICE]
"""The backend that ROSTER_TEST_DEVICE names."""
TESTED_AND_HOST = (
    [
        CPU,
        TestedBackend("host", host_backend, True, FLOAT32, FLOAT32, HOST_SHARE),
        TestedBackend("transformers", _load_transformers, False, FLOAT32, FLOAT32, HOST_SHARE),
        RANKS,
    ]
    if TESTED is CPU
    else [TESTED]
)
"""`TESTED` and, on the CPU, part of the cases on the GPU's host code, transformers' decoder, and two ranks."""


def parity_of(device: TestedBackend, folder: Path, precision: Precision | None = None) -> Parity | ExactParity:
    """Returns what compares greedy streams with transformers', or, of `DETERMINISTIC`, with its own logits."""
    if device is DETERMINISTIC:
        alone = device.load(folder, num_blocks=16, block_size=16, num_slots=1, max_step_tokens=256)
        assert isinstance(alone, TorchBackend)
        return ExactParity(alone)
    precision = precision or device.tiny
    return Parity(reference(folder, precision), precision)


def reference(folder: Path, precision: Precision) -> Any:
    """Returns transformers' model in float32 on the CPU, with the weights of a backend of this precision."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in model.parameters():  # parameters only: RoPE's frequencies are float32 everywhere
        parameter.data = parameter.data.to(precision.dtype).to(torch.float32)
    return model


def poison(cached: torch.Tensor) -> None:
    """Sets a part of a cache to NaN, before the backend's next step."""
    cached.fill_(torch.nan)
    synchronize(cached.device)


def synchronize(device: torch.device | str) -> None:
    """Waits for all work launched on the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
