"""Check that a usable GPU is present."""

from __future__ import annotations

import sys

from runner_svc.startup.gpu_probe import gpu_obstacle, torch_obstacle


def require_gpu(device: str = "cuda", *, kernels: bool = True) -> None:
    """Exits with status 1 and a message if `device` is a GPU that can't be used.

    `kernels`: the benchmark runs Roster's kernels, which need more than torch.
    """
    if not device.startswith("cuda"):
        return
    obstacle = gpu_obstacle() if kernels else torch_obstacle()
    if obstacle is not None:
        sys.exit(f"this runs on a GPU, but {obstacle.why}: {obstacle.remedy or 'start it on a machine with a GPU'}")
