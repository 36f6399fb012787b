"""Whether a process may be forked: what a fork would copy in a state that no child can use.

A thread is not copied, though the locks that it holds are, and a child can't use a GPU that its parent has used.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

_GPU = ("/dev/nvidia", "/dev/dxg")
"""Prefixes of the devices that CUDA's driver keeps open."""


def unfit() -> str:
    """Returns why no child of this process could be a rank; '' if it can."""
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        return f"{count} threads run once a rank's libraries are imported"
    if opened := opened_devices():
        return f"the import of a rank's libraries opens {opened[0]}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the import of a rank's libraries initializes CUDA"
    return ""


def opened_devices() -> list[str]:
    """Returns the devices of GPUs that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was that of the listing
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if path.startswith(_GPU))


def has_gpus() -> bool:
    """Returns whether this host has a GPU that a process might use, without asking CUDA's driver."""
    return any(any(Path(prefix).parent.glob(f"{Path(prefix).name}*")) for prefix in _GPU)
