"""Obstacles to using a GPU: the reason, the remedy, and whether there is a GPU at all."""

from __future__ import annotations

import builtins
import sys
import warnings
from pathlib import Path

import pytest
import torch

from runner_svc.startup import gpu_probe
from runner_svc.startup.gpu_probe import Obstacle, gpu_obstacle
from tests.support.fake_gpu import FULL, ILL, INSUFFICIENT, NO_DRIVER, OLD_DRIVER, FakeGpu, answering, gpu

__all__ = ["gpu"]
SEES, SEES_ON_THE_BUS = gpu_probe.gpu_is_here, gpu_probe.gpu_is_on_the_bus


def obstacle() -> Obstacle:
    found = gpu_obstacle()
    assert found is not None
    assert str(found) == f"{found.why}: {found.advice}" and found.advice.endswith("set device to 'cpu'")
    assert "\n" not in str(found)
    return found


def test_a_usable_gpu_has_no_obstacle(gpu: FakeGpu) -> None:
    assert gpu_obstacle() is None


def test_a_torch_without_cuda(gpu: FakeGpu) -> None:
    gpu.torch_without_cuda(here=False)
    assert obstacle() == Obstacle("torch is built without CUDA", gpu_is_here=False)
    gpu.torch_without_cuda(here=True)
    assert str(obstacle()) == ("torch is built without CUDA: install a build with CUDA, or set device to 'cpu'")
    assert obstacle().gpu_is_here


@pytest.mark.parametrize(
    ("error", "reason"),
    [(NO_DRIVER, "(Found no NVIDIA driver on your system)"), (None, "(no device is visible)")],
)
def test_no_gpu_at_all(gpu: FakeGpu, error: Exception | None, reason: str) -> None:
    gpu.unavailable(error, here=False)
    assert not obstacle().gpu_is_here
    assert "torch finds no usable GPU (" in obstacle().why and reason in obstacle().why
    assert obstacle().advice == "set device to 'cpu'"


def test_a_driver_that_is_too_old(gpu: FakeGpu) -> None:
    gpu.unavailable(OLD_DRIVER, here=False)  # the driver's error implies that there is a GPU
    assert str(obstacle()) == (
        "torch can't use the GPU (The NVIDIA driver on your system is too old (found version 11040)): "
        "update the driver, or set device to 'cpu'"
    )
    assert obstacle().gpu_is_here


def test_an_old_driver_is_not_also_reported_by_a_warning(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.unavailable(OLD_DRIVER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("too old", stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "too old" in obstacle().why


def test_a_gpu_without_its_driver(gpu: FakeGpu) -> None:
    gpu.unavailable(NO_DRIVER)
    assert obstacle().gpu_is_here and "the GPU of this machine" in obstacle().why
    assert "install the NVIDIA driver" in obstacle().remedy and "--gpus all" in obstacle().remedy
    gpu.unavailable(RuntimeError("No CUDA GPUs are available"))
    assert obstacle().remedy == "check that nvidia-smi works" and not obstacle().may_pass


def test_a_container_without_the_hosts_gpu(gpu: FakeGpu) -> None:
    """The PCI bus shows the host's GPU in the container."""
    gpu.unavailable(NO_DRIVER, here=False, on_the_bus=True)
    assert not obstacle().gpu_is_here and not obstacle().may_pass
    assert "the GPU of this machine" in obstacle().why and "--gpus all" in obstacle().remedy


COUNTING = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices()"


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (f"{COUNTING}? Error 2: out of memory", "Error 2: out of memory", gpu_probe._WAIT),
        (
            f"{COUNTING}? Error 802: system not yet initialized",
            "Error 802: system not yet initialized",
            gpu_probe._LOOK,
        ),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", "CUDA unknown", gpu_probe._LOOK),
    ],
)
def test_a_gpu_that_torch_can_not_count(gpu: FakeGpu, error: str, reason: str, remedy: str) -> None:
    gpu.unavailable(RuntimeError(error))
    assert obstacle().why.startswith(f"torch can't use the GPU ({reason}")
    assert obstacle().remedy == remedy and obstacle().may_pass
    gpu.unavailable(RuntimeError(error), here=False)
    assert not obstacle().gpu_is_here and not obstacle().may_pass


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), "end other programs that use the GPU, or wait"),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "end other programs"),
        (ILL, "check the GPU with nvidia-smi, and restart the machine if the GPU has failed"),
    ],
)
def test_a_gpu_that_is_full_or_failing(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, error: Exception, remedy: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", answering(None, error))
    assert obstacle().why == f"torch can't use the GPU ({str(error).splitlines()[0]})"
    assert obstacle().remedy.startswith(remedy) and obstacle().may_pass and "driver" not in obstacle().remedy


def test_a_gpu_that_is_hidden(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.unavailable(RuntimeError("No CUDA GPUs are available"))
    monkeypatch.setattr(gpu_probe, "gpu_is_here", SEES)
    monkeypatch.setattr(gpu_probe, "gpu_is_on_the_bus", SEES_ON_THE_BUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert obstacle() == Obstacle("torch finds no usable GPU (CUDA_VISIBLE_DEVICES is '')", gpu_is_here=False)


def test_a_gpu_that_torch_can_not_use(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: system not yet initialized\nCUDA kernel errors might be reported later")
    monkeypatch.setattr(torch.cuda, "get_device_name", answering(None, error))
    assert obstacle().why == "torch can't use the GPU (CUDA error: system not yet initialized)"


def test_a_card_that_is_too_old(gpu: FakeGpu) -> None:
    gpu.capability(7, 5)
    assert str(obstacle()) == ("NVIDIA Test has compute capability 7.5, but 8.0 is required: set device to 'cpu'")
    assert obstacle().gpu_is_here


def test_cupy_is_missing(gpu: FakeGpu) -> None:
    gpu.no_cupy()
    assert str(obstacle()) == "CuPy is not installed: pip install 'roster-serve[cuda]', or set device to 'cpu'"


def test_cupy_is_broken(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's error is a page between lines of "=", raised from the cause."""
    page = ImportError("\n=====\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libcudart\n=====\n")
    page.__cause__ = ImportError("libcudart.so.13: cannot open shared object file")
    monkeypatch.delitem(sys.modules, "cupy")
    real = builtins.__import__

    def importing(name: str, *more: object):
        if name == "cupy":
            raise page
        return real(name, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", importing)
    assert obstacle().why == "CuPy can't be imported (libcudart.so.13: cannot open shared object file)"
    page.__cause__ = None
    assert obstacle().why == "CuPy can't be imported (Failed to import CuPy)"
    page = ModuleNotFoundError("No module named 'cuda'", name="cuda")
    assert obstacle().why == "CuPy can't be imported (No module named 'cuda')"
    assert "pip install --force-reinstall 'roster-serve[cuda]'" in obstacle().remedy


@pytest.mark.parametrize(
    ("runtime", "nvrtc", "remedy"),
    [
        (INSUFFICIENT, None, "update the driver, or install torch and CuPy for the present driver"),
        (FULL, None, "end other programs that use the GPU"),
        (RuntimeError("cudaErrorECCUncorrectable: uncorrectable ECC error encountered"), None, "check the GPU with"),
        (None, RuntimeError("CuPy failed to load libnvrtc.so.13"), "update the driver, or install torch and CuPy"),
        (None, AttributeError(), "update the driver"),
    ],
)
def test_cupy_does_not_work_here(gpu: FakeGpu, runtime: Exception | None, nvrtc: Exception | None, remedy: str) -> None:
    gpu.cupy(runtime, nvrtc)
    error = runtime or nvrtc
    assert obstacle().why == f"CuPy can't use the GPU ({str(error) or 'AttributeError'})"
    assert obstacle().remedy.startswith(remedy) and obstacle().gpu_is_here
    assert obstacle().may_pass is not remedy.startswith("update")


def test_a_real_cupy_has_the_functions_of_the_probe() -> None:
    """CuPy has the functions that the probe calls; without a GPU they raise CUDA's errors, not AttributeError."""
    cupy = pytest.importorskip("cupy")
    assert callable(cupy.cuda.runtime.getDeviceCount) and callable(cupy.cuda.runtime.free)
    assert callable(cupy.cuda.nvrtc.getVersion)


@pytest.mark.parametrize(
    ("vendor", "kind", "seen"),
    [("0x10de\n", "0x030200\n", True), ("0x10de\n", "0x0c0330\n", False), ("0x8086\n", "0x030000\n", False)],
)
def test_a_gpu_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, kind: str, seen: bool) -> None:
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/gone").mkdir()
    for name, text in (("vendor", vendor), ("class", kind)):
        (tmp_path / "sys/bus/pci/devices/0000:01:00.0" / name).write_text(text)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_probe, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert gpu_probe.gpu_is_on_the_bus() is seen and not gpu_probe.gpu_is_here()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert gpu_probe.gpu_is_here()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not gpu_probe.gpu_is_here() and not gpu_probe.gpu_is_on_the_bus()
