"""Whether a GPU can be used here, and what stands in the way where not."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

# The least that the kernels are written for (asynchronous copies, bf16 in tensor cores).
LEAST_CAPABILITY = (8, 0)
_NVIDIA, _DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps a model off a GPU."""

    why: str
    """Half a sentence."""
    remedy: str = ""
    """What to do about it, if anything can be done."""
    gpu_is_here: bool = True

    @property
    def advice(self) -> str:
        """What to do."""
        return f"{self.remedy}, or set device to 'cpu'" if self.remedy else "set device to 'cpu'"

    def __str__(self) -> str:
        return f"{self.why}: {self.advice}"


def gpu_obstacle() -> Obstacle | None:
    """None where our kernels can run. Costs the first use of CUDA, which the backend would pay otherwise."""
    return torch_obstacle() or _card_obstacle() or _cupy_obstacle()


def torch_obstacle() -> Obstacle | None:
    """None where torch can use a GPU."""
    if torch.version.cuda is None:
        remedy = "install a build with it" if gpu_is_here() else ""
        return Obstacle("this torch is built without CUDA", remedy, bool(remedy))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a driver that is too old, and `_reason` says it
        if not torch.cuda.is_available():
            return _unavailable(_reason())
    try:
        torch.cuda.get_device_name()
    except RuntimeError as error:
        return Obstacle(f"torch can't use the GPU ({_first_sentence(error)})", _remedy(error))
    return None


def gpu_is_here() -> bool:
    """Whether this machine has an NVIDIA GPU that nobody hides, with a driver or without."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or any(map(_is_gpu, Path("/sys/bus/pci/devices").glob("*")))


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
    except OSError:
        return False
    return vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY)


def _unavailable(reason: str) -> Obstacle:
    if "too old" in reason:
        return Obstacle(f"torch can't use the GPU ({reason})", "update the driver")
    if gpu_is_here():
        remedy = "see whether nvidia-smi works"
        if "no NVIDIA driver" in reason:
            remedy = "install the NVIDIA driver, give the container the GPU if this is one (docker run --gpus all)"
        return Obstacle(f"torch finds no usable GPU, though one is here ({reason})", remedy)
    return Obstacle(f"torch finds no usable GPU ({reason})", gpu_is_here=False)


def _card_obstacle() -> Obstacle | None:
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return Obstacle(f"{name} has compute capability {capability[0]}.{capability[1]}, and 8.0 is the least")
    return None


def _cupy_obstacle() -> Obstacle | None:
    """Whether CuPy is there, gets on with the driver, and can compile."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return Obstacle("CuPy is not installed", "pip install 'roster-serve[cuda]'")
        return _broken_cupy(error)
    except Exception as error:  # whatever a broken library does while it loads
        return _broken_cupy(error)
    try:
        cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.runtime.free(0)  # creates the device's context
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        return Obstacle(f"CuPy can't use the GPU ({_first_sentence(error)})", _remedy(error))
    return None


def _broken_cupy(error: Exception) -> Obstacle:
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # CuPy frames it in a page of advice
    return Obstacle(
        f"CuPy can't be imported ({_first_sentence(cause)})",
        "pip install --force-reinstall 'roster-serve[cuda]'",
    )


def _remedy(error: Exception) -> str:
    if "out of memory" in str(error):
        return "end other programs that use the GPU"
    return "update the driver, or install the torch and CuPy that fit it"


def _reason() -> str:
    """What CUDA says: no driver, a driver that is too old, no device."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _first_sentence(error)
    return "no device is visible"


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =")]
    return lines[0].split(". ")[0].rstrip(". ") if lines else type(error).__name__
