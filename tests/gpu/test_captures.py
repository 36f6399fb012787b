"""A capture is not disturbed by what else happens in its process."""

from __future__ import annotations

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.device import GpuDevice


def test_no_garbage_is_collected_within_a_capture() -> None:
    """Once in two runs of several engines in one process a collection freed something of an earlier one meanwhile, and
    the capture was invalid."""
    device, values, collects = GpuDevice(), torch.zeros(1024, device="cuda"), []

    def step() -> None:
        collects.append(gc.isenabled())
        values.add_(1)

    replay = device.capture(step)
    before = float(values[0])
    replay()
    device.synchronize()
    assert collects == [True, False] and gc.isenabled()
    assert float(values[0]) == before + 1
