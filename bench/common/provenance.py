"""Provenance of a benchmark's numbers, and the only way to write them: `provenance`, then `write_results`.

bench/results holds only files that documents quote. A piece of work adds one file of at most 50 KB, and its tables go
to docs/; reports and pages are made from results and not committed. tests/docs/test_limits.py checks the limits.

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
"""Header fields that every results file must have."""
UNKNOWN = "unknown"
NOT_INSTALLED = "not installed"
CUPY = "cupy"
"""Stands for whichever of CuPy's distributions is installed."""
_CUPY_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", CUPY)


def provenance(module: str, packages: Sequence[str], card: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the command (`python -m module` and its arguments), date (UTC), commit, processor, cores, package
    versions and card, ready for JSON.

    `card` describes the device that computed, as `bench.common.gpu_timing.card` does; None stands for the processor. A
    missing package is recorded as such; it is no reason to lose the numbers.
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


def on_card(source: Mapping[str, Any], card: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the header with the card that computed, where it is only known later; None leaves it as it is."""
    return {**source, **({"card": dict(card)} if card else {})}


def _version(package: str) -> tuple[str, str]:
    """Returns the distribution's name, and its version or NOT_INSTALLED."""
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
            "The commit is unknown: set ROSTER_COMMIT to what `python -m bench.common.provenance` prints in the clone.",
            file=sys.stderr,
        )
    return found or UNKNOWN


def write_results(path: Path, source: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
    """Writes `numbers` as JSON behind the header `source`, which `provenance` returned.

    Raises ValueError if the header lacks a field or `numbers` would overwrite one.
    """
    missing = [name for name in REQUIRED if not source.get(name)]
    hidden = source.keys() & numbers.keys()
    if missing or hidden:
        raise ValueError(f"the header of these results lacks {missing}, or the numbers overwrite {sorted(hidden)}")
    path.write_text(json.dumps({**source, **numbers}, indent=1) + "\n")


if __name__ == "__main__":
    print(commit() or UNKNOWN)
