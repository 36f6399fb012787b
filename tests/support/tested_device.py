"""Which device the tests of real models run on: ROSTER_TEST_DEVICE, one of

| device | in this process | in processes of their own |
| --- | --- | --- |
| cpu, the default | the backend in torch | runners with `--device cpu` |
| host | the CUDA backend over launchers in torch, see `host_device` | as cpu |
| cuda | the CUDA backend with its kernels, on the first GPU | runners with `--device cuda` |

What whole processes need; `tested_backend` has the rest, and imports torch.
"""

from __future__ import annotations

import os

import pytest

DEVICE = os.environ.get("ROSTER_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "host", "cuda"):
    raise pytest.UsageError(f"ROSTER_TEST_DEVICE is {DEVICE!r}, not one of cpu, host, cuda")

PROCESS_DEVICE = "cuda" if DEVICE == "cuda" else "cpu"
"""For `--device` of a runner's process."""

PROCESS_DTYPE = "float16" if DEVICE == "cuda" else "auto"
"""For `--dtype` of a runner's process that serves a tiny model: of the kernels' types it is closer to float32."""


def _obstacle() -> object | None:
    """Why the tests can't run here, as a string tells it."""
    if DEVICE != "cuda":
        return None
    from runner_svc.startup.gpu_probe import gpu_obstacle  # imports torch

    return gpu_obstacle()


_OBSTACLE = _obstacle()
NEEDS_DEVICE = pytest.mark.skipif(_OBSTACLE is not None, reason=f"needs a GPU: {_OBSTACLE}")
"""Skips a test where ROSTER_TEST_DEVICE names a device that is not there."""
