"""Provenance of a run: the hardware, the versions, the commit and the time."""

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
    """Returns the versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def utc_now() -> str:
    """Returns the current time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_line(program: str = "roster") -> str:
    """Returns the current command line, quoted for a shell."""
    return shlex.join([*program.split(), *sys.argv[1:]])


def commit(root: Path = ROOT) -> str:
    """Returns the commit of the clone that this code runs from, with "-dirty" if files differ; "" if unknown.

    New files count as changes unless git ignores them; those in bench/results do not count. "-dirty" is also added if
    git fails. A copy of a clone on another machine has no repository, or an unrelated one: there, set `ROSTER_COMMIT`
    to the output of `python -m bench.common.provenance` in the clone. The variable takes precedence over a repository;
    a difference is reported on stderr.
    """
    told = os.environ.get("ROSTER_COMMIT", "").strip()
    found = _found_commit(root)
    if told and found and told != found:
        print(f"ROSTER_COMMIT is {told}, but this code is at {found}: unset it if it is outdated.", file=sys.stderr)
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
    """Returns git's output; None if git fails or is not installed."""
    command = ["git", "-C", str(root), "--no-optional-locks", *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if answer.returncode else answer.stdout.strip()


def processor() -> str:
    """Returns the CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_card() -> str:
    """Returns the CPU's name and the number of cores that this process may use."""
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores"


def query_gpus(fields: str) -> list[str]:
    """Returns the fields of nvidia-smi's `--query-gpu`, a line for each GPU; [] if there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if answer.returncode else [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def gpu_card() -> str | None:
    """Returns the name of this machine's NVIDIA GPU, with their number if there are several; None if it has none."""
    names = query_gpus("name")
    if not names:
        return None
    return names[0] if len(names) == 1 else f"{len(names)} × {names[0]}"
