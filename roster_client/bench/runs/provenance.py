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
ROOT = Path(__file__).resolve().parents[3]


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


def commit(root: Path = ROOT) -> str:
    """The commit of the clone that this code runs from, "-dirty" behind it where files differ; "" if unknown.

    New files count unless git ignores them, results in the tree don't; "-dirty" too where git can't say. A machine that
    was sent a copy of a clone has no repository, or one of its own making: there `ROSTER_COMMIT` says it, of what
    `python -m bench.common.provenance` prints beside the clone. It wins over a repository; stderr tells where that
    differs.
    """
    told = os.environ.get("ROSTER_COMMIT", "").strip()
    found = _found_commit(root)
    if told and found and told != found:
        print(f"ROSTER_COMMIT is {told}, but the code here is of {found}: unset it if it is stale.", file=sys.stderr)
    return told or found


def _found_commit(root: Path) -> str:
    if not (root / ".git").exists():
        return ""
    found = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    if not found:
        return ""
    changes = _git(root, "status", "--porcelain", "--untracked-files=normal", "--", ".", ":!bench/results")
    return found if changes == "" else f"{found}-dirty"


def _git(root: Path, *arguments: str) -> str | None:
    """What git says; None where it fails, or there is none."""
    command = ["git", "-C", str(root), "--no-optional-locks", *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if answer.returncode else answer.stdout.strip()


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
