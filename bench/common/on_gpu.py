"""A benchmark that needs a GPU says so where there is none that can be used."""

from __future__ import annotations

import sys

from runner_svc.startup.gpu_probe import gpu_obstacle, torch_obstacle


def require_gpu(device: str = "cuda", *, kernels: bool = True) -> None:
    """Ends the process with a sentence and status 1 where it is to run on a GPU that can't be used.

    `kernels`: it runs ours, for which more must be there than torch.
    """
    if not device.startswith("cuda"):
        return
    obstacle = gpu_obstacle() if kernels else torch_obstacle()
    if obstacle is not None:
        sys.exit(f"this runs on a GPU, but {obstacle.why}: {obstacle.remedy or 'start it on a machine with a GPU'}")
