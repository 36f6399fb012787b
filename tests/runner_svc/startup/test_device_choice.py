"""The choice of the device, the log if "auto" chooses the CPU, and the messages about a full or failing GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from structlog.testing import capture_logs

from roster_common.setting_sources import UnusableSettings
from runner_svc import service
from runner_svc.backends.hash_backend import HashBackend
from runner_svc.cuda.kernel import LaunchError
from runner_svc.gpu import loading as cuda_loading
from runner_svc.interface.pool_size import GRAPH_BYTES, MemoryProfile
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup import backend_factory
from runner_svc.startup.device_choice import choose_device
from tests.support.fake_gpu import FULL, ILL, INSUFFICIENT, NO_DRIVER, OLD_DRIVER, FakeGpu, answering, gpu
from tests.support.in_this_process import run_runner

__all__ = ["gpu"]


def told(device: str = "auto") -> tuple[str, list[dict]]:
    """Returns the chosen device and the log lines about it."""
    choice = choose_device(RunnerSettings(device=device))
    with capture_logs() as logs:
        choice.tell()
    return choice.device, logs


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_usable_gpu_logs_nothing(gpu: FakeGpu, device: str) -> None:
    assert told(device) == ("cuda", [])


@pytest.mark.parametrize("device", ["cpu", "hash", "null"])
def test_a_device_set_by_the_operator_logs_nothing(gpu: FakeGpu, device: str) -> None:
    gpu.no_cupy()
    assert told(device) == (device, [])


def test_no_gpu_is_one_line(gpu: FakeGpu) -> None:
    gpu.unavailable(NO_DRIVER, here=False)
    device, (line,) = told()
    assert (device, line["log_level"], line["event"]) == ("cpu", "info", "the model runs on the CPU")
    assert line["reason"].startswith("torch finds no usable GPU (Found no NVIDIA driver")


def test_a_container_without_the_hosts_gpu_is_one_line(gpu: FakeGpu) -> None:
    gpu.unavailable(NO_DRIVER, here=False, on_the_bus=True)
    device, (line,) = told()
    assert (device, line["log_level"], line["event"]) == ("cpu", "info", "the model runs on the CPU")
    assert "docker run --gpus all" in line["advice"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_full_or_failing_gpu_is_no_reason_for_the_cpu(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    gpu.cupy(runtime=FULL, nvrtc=None)
    ended = run_runner("--device", device)
    assert (ended.returncode, ended.stderr) == (
        2,
        f"roster-runner: device is '{device}', but CuPy can't use the GPU (cudaErrorMemoryAllocation: out of memory): "
        "end other programs that use the GPU, or wait for them while a supervisor restarts this runner, "
        "or set device to 'cpu'\n",
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", answering(None, ILL))
    with pytest.raises(UnusableSettings, match=r"uncorrectable ECC error .* nvidia-smi, .* restart the machine"):
        choose_device(RunnerSettings(device=device))
    assert told("cpu") == ("cpu", [])


def unusable(gpu: FakeGpu, case: str) -> None:
    match case:
        case "driver":
            gpu.unavailable(OLD_DRIVER)
        case "card":
            gpu.capability(7, 0)
        case "no CuPy":
            gpu.no_cupy()
        case "CuPy":
            gpu.cupy(runtime=INSUFFICIENT, nvrtc=None)
        case "torch":
            gpu.torch_without_cuda(here=True)


CASES = {
    "driver": "torch can't use the GPU (The NVIDIA driver on your system is too old",
    "card": "NVIDIA Test has compute capability 7.0, but 8.0 is required",
    "no CuPy": "CuPy is not installed",
    "CuPy": "CuPy can't use the GPU (cudaErrorInsufficientDriver: CUDA driver version is insufficient",
    "torch": "torch is built without CUDA",
}


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_that_can_not_be_used_is_a_warning(gpu: FakeGpu, case: str) -> None:
    unusable(gpu, case)
    device, (line,) = told()
    assert (device, line["log_level"]) == ("cpu", "warning")
    assert line["event"] == "the GPU is not used: the model runs on the CPU"
    assert line["reason"].startswith(CASES[case]) and line["advice"].endswith("set device to 'cpu'")


@pytest.mark.parametrize("case", CASES)
def test_device_cuda_without_a_usable_gpu_is_refused(gpu: FakeGpu, case: str) -> None:
    unusable(gpu, case)
    ended = run_runner("--device", "cuda")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(f"roster-runner: device is 'cuda', but {CASES[case]}")
    assert ended.stderr.endswith("set device to 'cpu'\n")


def test_the_ready_line_says_why_it_is_the_cpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.no_cupy()
    backend = HashBackend(num_slots=1, block_size=16, num_blocks=4)
    monkeypatch.setattr(service, "load_backend", lambda settings, device, times: backend)
    monkeypatch.setattr(service, "gc", mock.Mock())
    monkeypatch.setattr(service.signal, "signal", mock.Mock())
    with capture_logs() as logs:
        assert service.serve(RunnerSettings(), lambda *arguments: mock.Mock()) == 0
    assert [line["event"].partition(" ")[0] for line in logs] == ["the", "measured", "started", "ready", "stopped"]
    assert logs[0]["event"] == "the GPU is not used: the model runs on the CPU"
    assert logs[3]["no_gpu"] == "CuPy is not installed"


def test_torch_that_can_not_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(UnusableSettings, match=r"needs the extra 'runner' \(pip install 'roster-serve\[runner\]'\)"):
        choose_device(RunnerSettings(device="cpu"))


def test_a_gpu_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore"))
    monkeypatch.setattr(cuda_loading, "load_cuda_backend", full)
    with pytest.raises(UnusableSettings) as refused:
        backend_factory.build_backend(RunnerSettings(), "cuda", print)
    assert str(refused.value) == (
        "the GPU's memory is full: use a smaller model, lower slots, kv_tokens, max_step_tokens or context_length, "
        "or end other programs that use the GPU"
    )


ECC = "CUDA error: uncorrectable ECC error encountered"
LOOK = "check the GPU with nvidia-smi, and restart the machine if the GPU has failed, or set device to 'cpu'"


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (
            RuntimeError(f"{ECC}\nCUDA kernel errors might be asynchronously reported"),
            3,
            f"while the model loads, Roster can't use the GPU ({ECC}): {LOOK}",
        ),
        (
            LaunchError("launching embed on a grid of 4 failed: CUDA_ERROR_ILLEGAL_ADDRESS"),
            3,
            "while the model loads, Roster can't use the GPU (launching embed on a grid of 4 failed: "
            f"CUDA_ERROR_ILLEGAL_ADDRESS): {LOOK}",
        ),
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device\nFor debugging"),
            2,
            "while the model loads, Roster can't use the GPU (CUDA error: no kernel image is available for execution "
            "on the device): update the driver, or install torch and CuPy for the present driver, or set device to "
            "'cpu'",
        ),
    ],
)
def test_a_gpu_that_fails_while_the_model_loads(
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
    sentence: str,
) -> None:
    """The runner prints a sentence and exits with status 3 if a new process may be able to use the GPU."""
    monkeypatch.setattr(cuda_loading, "load_cuda_backend", mock.Mock(side_effect=error))
    monkeypatch.setattr(service.signal, "signal", mock.Mock())
    assert service.serve(RunnerSettings(device="cuda")) == status
    assert capsys.readouterr().err == f"roster-runner: {sentence}\n"


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        (
            'a.cu(1): warning: unused\n\na.cu(3): catastrophic error: cannot open source file "cuda_bf16.h"\n\n1 more',
            'a.cu(3): catastrophic error: cannot open source file "cuda_bf16.h"',
        ),
        ("nvrtc: invalid value\n", "nvrtc: invalid value"),
        ("", "no reason is given"),
    ],
)
def test_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch, log: str, complaint: str) -> None:
    """CuPy's compiler may be installed without CUDA's headers."""

    class CompileException(Exception):
        """Stands in for CuPy's."""

    monkeypatch.setitem(sys.modules, "cupy.cuda.compiler", SimpleNamespace(CompileException=CompileException))
    monkeypatch.setattr(cuda_loading, "load_cuda_backend", mock.Mock(side_effect=CompileException(log)))
    with pytest.raises(UnusableSettings) as refused:
        backend_factory.build_backend(RunnerSettings(), "cuda", print)
    assert str(refused.value).startswith(f"CuPy can't compile the kernels ({complaint}): if CUDA's headers are")
    assert "\n" not in str(refused.value)


def test_another_fault_without_cupy_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy.cuda.compiler", raising=False)
    monkeypatch.setattr(cuda_loading, "load_cuda_backend", mock.Mock(side_effect=KeyError("x")))
    with pytest.raises(KeyError):
        backend_factory.build_backend(RunnerSettings(), "cuda", print)


def test_a_gpu_without_room_for_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object) -> None:
        MemoryProfile(total=GRAPH_BYTES * 2, peak=GRAPH_BYTES, other=0).num_blocks(0.9, 1 << 20)

    monkeypatch.setattr(cuda_loading, "load_cuda_backend", load)
    with pytest.raises(UnusableSettings) as refused:
        backend_factory.build_backend(RunnerSettings(), "cuda", print)
    assert str(refused.value) == (
        "no GPU memory is left for KV: of 1.0 GiB, gpu_memory allows 90%; weights and the largest step take 0.5 GiB, "
        "the driver and other processes 0.0 GiB, CUDA graphs 0.5 GiB. Use a smaller model, lower max_step_tokens, "
        "slots or context_length, or raise gpu_memory"
    )
