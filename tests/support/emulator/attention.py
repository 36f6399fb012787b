"""`CudaAttention` with its kernels on the emulator; only the driver and CuPy are replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from runner_svc.attention import cuda_decode, cuda_prefill
from runner_svc.cuda import tensor_map
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.gpu_limits import SHARED_MEMORY


def emulate_attention(
    monkeypatch: pytest.MonkeyPatch, arch: str, multiprocessors: int, change: Callable[[str], str] = lambda text: text
) -> None:
    """Makes attention use `arch`'s kernels, with `change` applied to their text, on that many multiprocessors."""
    encoder = MapEncoder()
    shared = SHARED_MEMORY[arch]
    limits = {"MaxSharedMemoryPerMultiprocessor": shared.multiprocessor, "MaxSharedMemoryPerBlockOptin": shared.block}
    device = SimpleNamespace(attributes=limits)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device)))
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    monkeypatch.setattr(cuda_prefill, "is_hopper", lambda: arch == "sm_90a")
    for module in (cuda_decode, cuda_prefill):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, change=change, arch=arch))
        monkeypatch.setattr(module, "num_multiprocessors", lambda: multiprocessors)
