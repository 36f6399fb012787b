"""Device on which tests of real models run: ROSTER_TEST_DEVICE, one of

| device | in this process | in separate processes |
| --- | --- | --- |
| cpu, the default | the backend in torch | runners with `--device cpu` |
| host | the CUDA backend over launchers in torch, see `host_device` | as cpu |
| cuda | the CUDA backend with its kernels, on the first GPU | runners with `--device cuda` |

This module has what tests of whole processes need; `tested_backend` has the rest and imports torch.
"""

from __future__ import annotations

import os

import pytest

DEVICE = os.environ.get("ROSTER_TEST_DEVICE", "cpu")
if DEVICE not in ("cpu", "host", "cuda"):
    raise pytest.UsageError(f"ROSTER_TEST_DEVICE is {DEVICE!r}, not one of cpu, host, cuda")

PROCESS_DEVICE = "cuda" if DEVICE == "cuda" else "cpu"
"""`--device` of a runner process."""

PROCESS_DTYPE = "float16" if DEVICE == "cuda" else "auto"
"""`--dtype` of a runner process that serves a tiny model: the kernels' type that is closer to float32."""


def _obstacle() -> object | None:
    """Returns why the tests cannot run here (its string says so), or None."""
    if DEVICE != "cuda":
        return None
    from runner_svc.startup.gpu_probe import gpu_obstacle  # imports torch

    return gpu_obstacle()


_OBSTACLE = _obstacle()
NEEDS_DEVICE = pytest.mark.skipif(_OBSTACLE is not None, reason=f"needs a GPU: {_OBSTACLE}")
"""Skips a test if the device named by ROSTER_TEST_DEVICE is not available."""
