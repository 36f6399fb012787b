"""Checks whether this process can use a GPU, and if not, why and what to do."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from runner_svc.startup.kernel_cache import choose_kernel_cache

# Lowest compute capability of the kernels (asynchronous copies, bf16 in tensor cores).
LEAST_CAPABILITY = (8, 0)
_NVIDIA, _DISPLAY = "0x10de", "0x03"

# Parts of CUDA's errors in messages of torch and CuPy: any CUDA error, a GPU in use, incompatible versions.
_FAILURES = (
    "CUDA error",
    "CUDA unknown error",
    "CUDA driver initialization failed",
    "cudaError",
    "CUDA_ERROR",
    "cudaGetDeviceCount",
)
_FULL = ("out of memory", "cudaErrorMemoryAllocation", "busy or unavailable", "cudaErrorDevicesUnavailable")
_AT_ODDS = (
    "insufficient",
    "no kernel image",
    "PTX",
    "mismatch",
    "unsupported display driver",
    "forward compatibility",
    "not supported on this device",
)
_WAIT = "end other programs that use the GPU, or wait for them while a supervisor restarts this runner"
_LOOK = "check the GPU with nvidia-smi, and restart the machine if the GPU has failed"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Reason that a model can't run on a GPU."""

    why: str
    """A clause without a period."""
    remedy: str = ""
    """A clause that says how to make the GPU usable; "" if that is impossible."""
    gpu_is_here: bool = True
    may_pass: bool = False
    """The GPU is only full or failing, which is no reason to compute elsewhere."""

    @property
    def advice(self) -> str:
        """The remedy, or the device to set instead."""
        return f"{self.remedy}, or set device to 'cpu'" if self.remedy else "set device to 'cpu'"

    def __str__(self) -> str:
        return f"{self.why}: {self.advice}"


def gpu_obstacle(cache_folder: Path | None = None) -> Obstacle | None:
    """Returns None if the kernels can run. Initialises CUDA, which the backend would do otherwise.

    CuPy keeps compiled kernels below `cache_folder`, unless CUPY_CACHE_DIR says where.
    """
    obstacle = torch_obstacle() or _card_obstacle()
    if obstacle is not None:
        return obstacle
    if cache_folder is not None:
        choose_kernel_cache(cache_folder)
    return _cupy_obstacle()


def failure(error: Exception) -> Obstacle | None:
    """Classifies an error of a GPU that was usable before; None if it is not a CUDA error."""
    if not any(words in str(error) for words in _FAILURES):
        return None
    return _failing("Roster", error)


def torch_obstacle() -> Obstacle | None:
    """Returns None if torch can use a GPU."""
    if torch.version.cuda is None:
        here = gpu_is_here()
        remedy = "install a build with CUDA" if here or gpu_is_on_the_bus() else ""
        return Obstacle("torch is built without CUDA", remedy, here)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an old driver, which `_unavailable` reports
        if not torch.cuda.is_available():
            return _unavailable()
    try:
        torch.cuda.get_device_name()
    except RuntimeError as error:
        return _failing("torch", error)
    return None


def gpu_is_here() -> bool:
    """Returns whether this process has a device file of an NVIDIA GPU, not hidden by CUDA_VISIBLE_DEVICES."""
    return not _is_hidden() and any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_is_on_the_bus() -> bool:
    """Returns whether the machine has an NVIDIA GPU, even without a driver or not passed to this container."""
    return not _is_hidden() and any(map(_is_gpu, Path("/sys/bus/pci/devices").glob("*")))


def _is_hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
    except OSError:
        return False
    return vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)


def _unavailable() -> Obstacle:
    error = _init_error()
    reason = _first_sentence(error)
    if "too old" in reason:
        return Obstacle(f"torch can't use the GPU ({reason})", "update the driver")
    here = gpu_is_here()
    if here and any(words in str(error) for words in _FAILURES):
        return _failing("torch", error)
    if not here and not gpu_is_on_the_bus():
        return Obstacle(f"torch finds no usable GPU ({reason})", gpu_is_here=False)
    remedy = "check that nvidia-smi works"
    if not here or "no NVIDIA driver" in reason:
        remedy = "install the NVIDIA driver or, in a container, pass the GPU to it (docker run --gpus all)"
    return Obstacle(f"torch can't use the GPU of this machine ({reason})", remedy, here)


def _card_obstacle() -> Obstacle | None:
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return Obstacle(f"{name} has compute capability {capability[0]}.{capability[1]}, but 8.0 is required")
    return None


def _cupy_obstacle() -> Obstacle | None:
    """Checks that CuPy is installed, works with the driver and has a compiler; compiling is only tested on loading."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return Obstacle("CuPy is not installed", "pip install 'roster-serve[cuda]'")
        return _broken_cupy(error)
    except Exception as error:  # a broken library may raise anything on import
        return _broken_cupy(error)
    try:
        cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.runtime.free(0)  # creates the device's context
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        return _failing("CuPy", error)
    return None


def _broken_cupy(error: Exception) -> Obstacle:
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # CuPy wraps it in a page of advice
    return Obstacle(
        f"CuPy can't be imported ({_first_sentence(cause)})",
        "pip install --force-reinstall 'roster-serve[cuda]'",
    )


def _failing(library: str, error: Exception) -> Obstacle:
    """Classifies an error of a GPU that exists.

    | error                                                 | remedy                       | may pass |
    | ----------------------------------------------------- | ---------------------------- | -------- |
    | memory is full, or another process has the GPU        | wait                         | yes      |
    | incompatible driver, GPU and libraries; no CUDA error | install compatible versions  | no       |
    | any other CUDA error                                  | check the GPU, restart       | yes      |
    """
    text = str(error)
    reason = _told(error)
    why = f"{library} can't use the GPU ({reason})"
    if any(words in text for words in _FULL):
        return Obstacle(why, _WAIT, may_pass=True)
    if any(words in text for words in _AT_ODDS) or not any(words in text for words in _FAILURES):
        return Obstacle(why, "update the driver, or install torch and CuPy for the present driver")
    return Obstacle(why, _LOOK, may_pass=True)


def _init_error() -> Exception:
    """Returns CUDA's error on initialisation: no driver, an old driver, no device, or a failing one."""
    if _is_hidden():
        return RuntimeError(f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return error
    return RuntimeError("no device is visible")


def _told(error: Exception) -> str:
    """Returns the error's first sentence or, if torch failed to count devices, the CUDA error in its message."""
    number = re.search(r"Error \d+: .*", str(error))
    return number[0].rstrip(". ") if number else _first_sentence(error)


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =")]
    return lines[0].split(". ")[0].rstrip(". ") if lines else type(error).__name__
