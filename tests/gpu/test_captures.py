"""A capture is not disturbed by what else happens in its process."""

from __future__ import annotations

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.device import GpuDevice


class Circle:
    """What an earlier backend had: a graph, an event and page-locked memory that only a garbage collection frees."""

    def __init__(self) -> None:
        self.device = GpuDevice()
        self.memory = self.device.pinned(1 << 20)
        self.tensor = torch.ones(8, device="cuda")
        self.replay = self.device.capture(lambda: self.tensor.mul_(1))
        self.event = self.device.event()
        self.me = self


def test_garbage_of_an_earlier_backend_waits_for_the_end_of_a_capture() -> None:
    device, values = GpuDevice(), torch.zeros(1024, device="cuda")
    former, freed, calls = [Circle()], [], 0

    def step() -> None:
        nonlocal calls
        calls += 1
        values.add_(1)
        if calls == 2:  # within the capture
            former.clear()
            freed.extend([[] for _ in range(1000)])  # each of them may begin a collection
        values.add_(1)

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        replay = device.capture(step)
    finally:
        gc.set_threshold(*thresholds)
    before = float(values[0])
    replay()
    device.synchronize()
    assert calls == 2 and float(values[0]) == before + 2 and gc.isenabled()
