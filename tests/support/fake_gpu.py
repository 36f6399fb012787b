"""A simulated GPU: the answers of torch and CuPy about one, for tests of the obstacles to its use."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from runner_svc.startup import gpu_probe


class FakeGpu:
    """A Hopper GPU with all its requirements, until a test removes some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(gpu_probe, "choose_kernel_cache", lambda folder: None)
        self._is_here(True)
        self.cupy(runtime=None, nvrtc=None)

    def cupy(self, runtime: Exception | None, nvrtc: Exception | None) -> None:
        """Installs CuPy, whose calls into the driver, or the compiler, raise these errors."""
        calls = SimpleNamespace(getDeviceCount=answering(1, runtime), free=answering(None, runtime))
        cuda = SimpleNamespace(runtime=calls, nvrtc=SimpleNamespace(getVersion=answering((13, 0), nvrtc)))
        self._patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))

    def no_cupy(self) -> None:
        self._patch.setitem(sys.modules, "cupy", None)

    def capability(self, major: int, minor: int) -> None:
        self._patch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))

    def unavailable(self, error: Exception | None, here: bool = True, on_the_bus: bool = False) -> None:
        """Makes torch find no GPU and raise `error` on initialization.

        `on_the_bus`: the PCI bus shows a GPU, as it does even to containers without access to it.
        """
        self._patch.setattr(torch.cuda, "is_available", lambda: False)
        self._patch.setattr(torch.cuda, "init", answering(None, error))
        self._is_here(here, on_the_bus)

    def torch_without_cuda(self, here: bool) -> None:
        self._patch.setattr(torch.version, "cuda", None)
        self._is_here(here)

    def _is_here(self, here: bool, on_the_bus: bool = False) -> None:
        self._patch.setattr(gpu_probe, "gpu_is_here", lambda: here)
        self._patch.setattr(gpu_probe, "gpu_is_on_the_bus", lambda: here or on_the_bus)


def answering(value: object, error: Exception | None = None):
    """Returns a function that returns the value or raises the error."""

    def answer(*arguments: object) -> object:
        if error is not None:
            raise error
        return value

    return answer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """To be imported into the test module that uses it."""
    return FakeGpu(monkeypatch)


NO_DRIVER = RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")
OLD_DRIVER = RuntimeError(
    "The NVIDIA driver on your system is too old (found version 11040). Please update\nyour GPU driver"
)
INSUFFICIENT = RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")
FULL = RuntimeError("cudaErrorMemoryAllocation: out of memory")
ILL = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later")
