"""Whether a GPU can be used here, and what stands in the way where not."""

from __future__ import annotations

import importlib.util

import torch

# The least that the kernels are written for (asynchronous copies, bf16 in tensor cores).
LEAST_CAPABILITY = (8, 0)


def gpu_obstacle() -> str | None:
    """Half a sentence that says why no GPU can be used and what to do; None where one can."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA: install a build with it, or set device to 'cpu'"
    if not torch.cuda.is_available():
        return f"torch finds no usable GPU ({_reason()}): set device to 'cpu'"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {capability[0]}.{capability[1]}, 8.0 is needed: set device to 'cpu'"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'roster-serve[cuda]', or set device to 'cpu'"
    return None


def _reason() -> str:
    """What CUDA says: no driver, a driver that is too old, no device."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0].rstrip(". ")
    return "no device is visible"
