"""Where a benchmark's numbers come from, and the one way to write them down: `provenance`, then `write_results`.

`python -m bench.common.provenance` prints the commit, for `ROSTER_COMMIT` on a machine with only a copy of the tree.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roster_client.bench.runs.provenance import commit, processor, utc_now

REQUIRED = ("command", "date", "commit", "card", "versions")
"""What every file of results must say of where it comes from."""
UNKNOWN = "unknown"
NOT_INSTALLED = "not installed"
CUPY = "cupy"
"""Stands for whichever of its distributions is there."""
_CUPY_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", CUPY)


def provenance(module: str, packages: Sequence[str], card: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Command (of `python -m module`), date (UTC), commit, processor, cores, package versions and card, ready for JSON.

    `card` is what computed, of `bench.common.gpu_timing`; None stands for the processor. A package that is missing is
    recorded as such: its version is not worth the numbers.
    """
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": utc_now(),
        "commit": _known_commit(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **dict(map(_version, packages))},
        "card": dict(card or {"card": processor()}),
    }


def _version(package: str) -> tuple[str, str]:
    """The distribution's name, and its version or NOT_INSTALLED."""
    for name in _CUPY_DISTRIBUTIONS if package == CUPY else (package,):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return package, NOT_INSTALLED


def _known_commit() -> str:
    found = commit()
    if not found:
        print(
            "The commit is not known here: set ROSTER_COMMIT to what `python -m bench.common.provenance` prints.",
            file=sys.stderr,
        )
    return found or UNKNOWN


def write_results(path: Path, source: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
    """Writes the JSON. `source`: of `provenance`; ValueError where it lacks something, or `numbers` would hide it."""
    missing = [name for name in REQUIRED if not source.get(name)]
    hidden = source.keys() & numbers.keys()
    if missing or hidden:
        raise ValueError(f"results without {missing}, or with other values for {sorted(hidden)}")
    path.write_text(json.dumps({**source, **numbers}, indent=1) + "\n")


if __name__ == "__main__":
    print(commit() or UNKNOWN)
