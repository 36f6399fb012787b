"""What timings depend on: card, driver and libraries, their variables, the sources, the model's shape, and the sizes.

Locked clocks are not part of it (docs/operators.md).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from runner_svc.cuda.module import is_portable
from runner_svc.cuda.sources import PACKAGE, kernel_folder
from runner_svc.timings.management_library import driver_version, power_limit

_PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "transformers", "nvidia-cublas", "nvidia-cublas-cu12")
_ATTRIBUTES = ("MultiProcessorCount", "ClockRate", "MemoryClockRate", "GlobalMemoryBusWidth")
# Variables that make launches or products slower or faster: for debugging, a share of the card, other algorithms.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "NVIDIA_TF32_OVERRIDE",
)
# Keys of config.json that say nothing of a model's shape.
_NO_SHAPE = ("_name_or_path", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id")


def timings_key(config: Mapping[str, Any], dtype: torch.dtype, options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the key of a model on the current GPU.

    `config`: config.json's content; `options`: what the operator set, sizes included.
    """
    return {
        **card_key(),
        "host": _processor(),
        **{package: version for package in _PACKAGES if (version := _version(package))},
        "cuda": str(torch.version.cuda),
        "portable": str(is_portable()),
        **{name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
        "sources": sources_hash(PACKAGE, kernel_folder()),
        "model": json.dumps({name: config[name] for name in sorted(config) if name not in _NO_SHAPE}, sort_keys=True),
        "dtype": str(dtype),
        **{f"option {name}": str(value) for name, value in options.items()},
    }


def card_key() -> dict[str, str]:
    """Returns the current GPU's model, driver and power limit. Cards of one model differ in their limits alone."""
    import cupy

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = cupy.cuda.Device()
    attributes = device.attributes
    return {
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        **{name: str(attributes.get(name)) for name in _ATTRIBUTES},
        "driver": driver_version() or str(cupy.cuda.runtime.driverGetVersion()),
        "power": power_limit(device.pci_bus_id),
    }


@cache
def sources_hash(*folders: Path) -> str:
    """Returns a hash of the folders' Python and CUDA sources: those of what is timed, and of the timing."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in folders:
        paths = [path for suffix in ("py", "cu", "cuh") for path in folder.rglob(f"*.{suffix}")]
        for path in sorted(paths):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _processor() -> str:
    """Returns the host's processor: launching kernels takes its time."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
