"""What stands in the way of a GPU, as half a sentence that says what to do."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from runner_svc.gpu_probe import gpu_obstacle


@pytest.fixture
def good_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch sees a Hopper GPU, and CuPy is there."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return monkeypatch


def obstacle() -> str:
    found = gpu_obstacle()
    assert found is not None
    assert "set device to 'cpu'" in found
    return found


def test_nothing_stands_in_the_way(good_gpu: pytest.MonkeyPatch) -> None:
    assert gpu_obstacle() is None


def test_a_torch_without_cuda(good_gpu: pytest.MonkeyPatch) -> None:
    good_gpu.setattr(torch.version, "cuda", None)
    assert "built without CUDA: install a build with it" in obstacle()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update"), "too old"),
        (RuntimeError("Found no NVIDIA driver on your system."), "Found no NVIDIA driver on your system)"),
        (None, "no device is visible"),
    ],
)
def test_no_driver_or_one_that_is_too_old(good_gpu: pytest.MonkeyPatch, error: Exception | None, reason: str) -> None:
    def init() -> None:
        if error is not None:
            raise error

    good_gpu.setattr(torch.cuda, "is_available", lambda: False)
    good_gpu.setattr(torch.cuda, "init", init)
    assert reason in obstacle()


def test_a_gpu_that_is_too_old(good_gpu: pytest.MonkeyPatch) -> None:
    good_gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "NVIDIA Test has compute capability 7.5, 8.0 is needed" in obstacle()


def test_cupy_is_missing(good_gpu: pytest.MonkeyPatch) -> None:
    good_gpu.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'roster-serve[cuda]'" in obstacle()
