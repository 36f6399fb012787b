"""Whether a GPU can be used here, and what stands in the way where not."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

# The least that the kernels are written for (asynchronous copies, bf16 in tensor cores).
LEAST_CAPABILITY = (8, 0)
_NVIDIA, _DISPLAY = "0x10de", "0x03"

# CUDA's errors as torch and CuPy tell them: which are the GPU's at all, of a GPU in use, of versions that don't fit.
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
_WAIT = "end other programs that use the GPU, or wait for them: a supervisor starts this runner again"
_LOOK = "see what nvidia-smi says of the GPU, and restart the machine if it is ill"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps a model off a GPU."""

    why: str
    """Half a sentence."""
    remedy: str = ""
    """What to do about it, if anything can be done."""
    gpu_is_here: bool = True
    may_pass: bool = False
    """The GPU is only full or ill: no reason to compute elsewhere."""

    @property
    def advice(self) -> str:
        """What to do."""
        return f"{self.remedy}, or set device to 'cpu'" if self.remedy else "set device to 'cpu'"

    def __str__(self) -> str:
        return f"{self.why}: {self.advice}"


def gpu_obstacle() -> Obstacle | None:
    """None where our kernels can run. Costs the first use of CUDA, which the backend would pay otherwise."""
    return torch_obstacle() or _card_obstacle() or _cupy_obstacle()


def failure(error: Exception) -> Obstacle | None:
    """What an error of the GPU means that was usable before; None for one that is not CUDA's."""
    if not any(words in str(error) for words in _FAILURES):
        return None
    return _failing("Roster", error)


def torch_obstacle() -> Obstacle | None:
    """None where torch can use a GPU."""
    if torch.version.cuda is None:
        here = gpu_is_here()
        remedy = "install a build with it" if here or gpu_is_on_the_bus() else ""
        return Obstacle("this torch is built without CUDA", remedy, here)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a driver that is too old, and `_unavailable` says it
        if not torch.cuda.is_available():
            return _unavailable()
    try:
        torch.cuda.get_device_name()
    except RuntimeError as error:
        return _failing("torch", error)
    return None


def gpu_is_here() -> bool:
    """Whether there is an NVIDIA GPU with a driver that this process was given and nobody hides."""
    return not _is_hidden() and any(Path("/dev").glob("nvidia[0-9]*"))


def gpu_is_on_the_bus() -> bool:
    """Whether this machine has one, with a driver or without; to a container it may not be given."""
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
    remedy = "see whether nvidia-smi works"
    if not here or "no NVIDIA driver" in reason:
        remedy = "install the NVIDIA driver, give the container the GPU if this is one (docker run --gpus all)"
    return Obstacle(f"torch finds no usable GPU, though one is here ({reason})", remedy, here)


def _card_obstacle() -> Obstacle | None:
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return Obstacle(f"{name} has compute capability {capability[0]}.{capability[1]}, and 8.0 is the least")
    return None


def _cupy_obstacle() -> Obstacle | None:
    """Whether CuPy is there, gets on with the driver, and has a compiler. That it compiles, loading kernels shows."""
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
        return _failing("CuPy", error)
    return None


def _broken_cupy(error: Exception) -> Obstacle:
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # CuPy frames it in a page of advice
    return Obstacle(
        f"CuPy can't be imported ({_first_sentence(cause)})",
        "pip install --force-reinstall 'roster-serve[cuda]'",
    )


def _failing(library: str, error: Exception) -> Obstacle:
    """A GPU that is there, and what is wrong: it is full, or versions are at odds, or it is ill.

    | CUDA says                                             | so                          | may pass |
    | ----------------------------------------------------- | --------------------------- | -------- |
    | that memory is full, or the GPU is another's          | wait                        | yes      |
    | that driver, card and libraries don't fit; or nothing | install what fits           | no       |
    | any other error                                       | look at the GPU, start anew | yes      |
    """
    text = str(error)
    reason = _told(error)
    why = f"{library} can't use the GPU ({reason})"
    if any(words in text for words in _FULL):
        return Obstacle(why, _WAIT, may_pass=True)
    if any(words in text for words in _AT_ODDS) or not any(words in text for words in _FAILURES):
        return Obstacle(why, "update the driver, or install the torch and CuPy that fit it")
    return Obstacle(why, _LOOK, may_pass=True)


def _init_error() -> Exception:
    """What CUDA says: no driver, a driver that is too old, no device, or what ails it."""
    if _is_hidden():
        return RuntimeError(f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return error
    return RuntimeError("no device is visible")


def _told(error: Exception) -> str:
    """Its first sentence; where torch counts devices, CUDA's own words come after torch's question."""
    number = re.search(r"Error \d+: .*", str(error))
    return number[0].rstrip(". ") if number else _first_sentence(error)


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =")]
    return lines[0].split(". ")[0].rstrip(". ") if lines else type(error).__name__
