"""A capture stands what else happens in its process."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.device import GpuDevice  # noqa: E402


class Circle:
    """Page-locked memory and an event that only a garbage collection frees."""

    def __init__(self) -> None:
        self.memory = torch.zeros(1 << 20, dtype=torch.int32, pin_memory=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.tensor = torch.ones(8, device="cuda") * 2
        self.me = self


def test_garbage_of_an_earlier_backend_is_freed_after_a_capture() -> None:
    device = GpuDevice()
    values = torch.zeros(1024, device="cuda")
    Circle()
    thresholds = gc.get_threshold()
    gc.set_threshold(1)  # collects at any allocation

    def step() -> None:
        for _ in range(64):
            values.add_(1)
            [[] for _ in range(8)]

    try:
        replay = device.capture(step)
    finally:
        gc.set_threshold(*thresholds)
    before = float(values[0])
    replay()
    device.synchronize()
    assert float(values[0]) == before + 64 and gc.isenabled()
