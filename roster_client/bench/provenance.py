"""Where a run's numbers come from: the machine, its card, the versions, the commit and the time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

PACKAGES = ("roster-serve", "grpcio", "aiohttp", "numpy", "torch", "transformers")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Python's version and those of the packages that are installed here."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def utc_now() -> str:
    """ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line(program: str = "roster") -> str:
    """The command that runs, as it can be typed again."""
    return shlex.join([*program.split(), *sys.argv[1:]])


def commit() -> str:
    """The commit of the clone that this code runs from, "" outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    answer = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def processor() -> str:
    """The CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_card() -> str:
    """The processor and how many of its cores this process may use."""
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores"


def gpu_card() -> str | None:
    """Names of this machine's NVIDIA cards, None where there are none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    if answer.returncode or not names:
        return None
    return names[0] if len(names) == 1 else f"{len(names)} × {names[0]}"
